package admin

import (
	"fmt"
	"net/http"
	"net/http/pprof"
	"net/url"
	"strconv"
)

// profiles are the pages of Go's profiler under ztunnel's paths.
func (s *Server) profiles() []page {
	pages := []page{
		{"/debug/pprof/profile", "CPU profile (?seconds=10)", cpuProfile},
		{"/debug/pprof/heap", "what is allocated", pprof.Handler("heap").ServeHTTP},
		{"/debug/pprof/heap/profiling", "whether that is recorded: always", heapProfiling},
		{"/debug/pprof/trace", "trace of the scheduler (?seconds=1)", pprof.Trace},
		{"/debug/pprof/cmdline", "arguments of the process", pprof.Cmdline},
		{"/debug/pprof/symbol", "names of program counters", pprof.Symbol},
	}
	for _, name := range []string{"goroutine", "allocs", "block", "mutex", "threadcreate"} {
		pages = append(pages, page{"/debug/pprof/" + name, "", pprof.Handler(name).ServeHTTP})
	}
	return pages
}

// cpuProfile checks seconds (1 to 300, else 10) and frequency (1 to 1000 Hz), which is Go's own whatever is asked for.
func cpuProfile(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	for _, p := range []struct {
		name string
		most int
	}{{"seconds", 300}, {"frequency", 1000}} {
		if v := q.Get(p.name); v != "" {
			if n, err := strconv.Atoi(v); err != nil || n < 1 || n > p.most {
				w.WriteHeader(http.StatusBadRequest)
				write(w, fmt.Sprintf("%s=%s: want a number from 1 to %d\n", p.name, v, p.most))
				return
			}
		}
	}
	if q.Get("seconds") == "" {
		r.Form = url.Values{"seconds": {"10"}}
	}
	pprof.Profile(w, r)
}

func heapProfiling(w http.ResponseWriter, r *http.Request) {
	if v := r.URL.Query().Get("activate"); v != "" && v != "true" && v != "false" {
		w.WriteHeader(http.StatusBadRequest)
		write(w, "activate="+strconv.Quote(v)+": want true or false\n")
		return
	}
	write(w, "heap profiling active: true\n")
}
