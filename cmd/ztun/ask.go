package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"
)

// maxDump is the largest dump that is read, in bytes: a million workloads are about a gigabyte.
const maxDump = 2 << 30

// askTime is how long an answer of a running ztun may take.
const askTime = 30 * time.Second

// isItThere follows an error of asking.
const isItThere = "is a ztun running there? --admin says where one is"

// checkAdmin says what is wrong with the value of --admin.
func checkAdmin(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return fmt.Errorf("--admin %s: want ADDRESS:PORT, such as 127.0.0.1:15000", addr)
	}
	return nil
}

// fetch returns what a running ztun has at a path; any status but 200 is an error.
func fetch(ctx context.Context, addr, path string) ([]byte, error) {
	status, data, err := get(ctx, addr, path)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%s: %s: %d %s", addr, path, status, http.StatusText(status))
	}
	return data, err
}

// open asks a running ztun for what it has at a path. The caller closes the body.
func open(ctx context.Context, addr, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return nil, unanswered(addr, err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // past proxies of the environment
	resp, err := client.Do(req)
	if err != nil {
		return nil, unanswered(addr, err)
	}
	return resp, nil
}

func get(ctx context.Context, addr, path string) (status int, data []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	resp, err := open(ctx, addr, path)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	data, err = io.ReadAll(io.LimitReader(resp.Body, maxDump+1))
	switch {
	case len(data) > maxDump:
		return 0, nil, fmt.Errorf("%s: the answer is too large", addr)
	case err != nil:
		return 0, nil, unanswered(addr, err)
	}
	return resp.StatusCode, data, nil
}

// noZtun is the error of an answer that is none of ours.
func noZtun(addr, path string) error {
	return fmt.Errorf("what answers at %s is no ztun: %s is no JSON of ours; --admin says where one is", addr, path)
}

// unanswered says why nothing came from an address, without the request's URL and the calls of the network.
func unanswered(addr string, err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err
	}
	if e, ok := errors.AsType[*net.OpError](err); ok {
		err = e.Err
	}
	if e, ok := errors.AsType[*os.SyscallError](err); ok {
		err = e.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: no answer within %v", addr, askTime)
	}
	return fmt.Errorf("%s: %w", addr, err)
}
