package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
)

// tools are the programs that this binary also is. Each takes flags and, but for those that serve until they are killed, writes
// its result as one line of JSON.
var tools = map[string]func(fs *flag.FlagSet, args []string) (any, error){
	"bench-server":   serverTool,
	"bench-bulk":     bulkTool,
	"bench-pingpong": pingpongTool,
	"bench-connect":  connectTool,
	"bench-idle":     idleTool,
	"bench-slow":     slowTool,
	"bench-relay":    relayTool,
	"bench-tlsrelay": tlsRelayTool,
}

// toolMain returns an exit code.
func toolMain(name string, tool func(*flag.FlagSet, []string) (any, error), args []string) int {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	result, err := tool(fs, args)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(result)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		return 1
	}
	return 0
}

// ownThreads prepares the process for goroutines that stay on their threads and block there in system calls, as threads of a
// program in C do: none of them ever has to wait for the Go scheduler, and nothing is collected because nothing is allocated. Each may keep
// one of its processors while it sleeps, in raw system calls; toolEnvironment keeps the signals away by which it asks for them back.
func ownThreads(n int) {
	runtime.GOMAXPROCS(n + 4)
	debug.SetGCPercent(-1)
}

// onThread runs f on a thread of its own.
func onThread(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return done
}
