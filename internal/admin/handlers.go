package admin

import (
	"encoding/json"
	"fmt"
	"html"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"
)

// A page is a path of the admin port.
type page struct {
	path, meaning string
	serve         http.HandlerFunc
}

func (s *Server) adminHandler() http.Handler {
	pages := []page{
		{"/config_dump", "everything this node sees and holds, as JSON", s.configDump},
		{"/logging", "POST: show and change log levels (?level=info,access=debug&reset&for=10m)", s.logging},
		{"/quitquitquit", "POST: end the process in order", s.quit},
		{"/debug/config", "settings, their values and where these come from", s.debug(func() any { return s.settings() })},
		{"/debug/pods", "pods and their state", s.debug(func() any { return s.pods() })},
		{"/debug/conns", "open connections: state, age, idle time, identities, bytes, tunnel, policy, times of the set-up", s.debug(func() any { return s.conns() })},
		{"/debug/certs", "certificates, without keys", s.debug(func() any { return s.certificates() })},
	}
	if s.cfg.Explain != nil {
		pages = append(pages, page{"/debug/explain", "which way a flow takes, and why, as ztun explain tells it (?from=NAMESPACE/NAME&to=ADDRESS:PORT&udp&inbound&plaintext)", s.cfg.Explain})
	}
	if s.cfg.Capture != nil {
		pages = append(pages, page{"/debug/capture", "packets of pods as pcapng (?pod=NAMESPACE/NAME&point=pod,tunnel&seconds=60&bytes=N&packets=N&snaplen=N)", s.cfg.Capture})
	}
	pages = append(pages, s.profiles()...)
	paths := make(map[string]http.HandlerFunc, len(pages)+1)
	for _, p := range pages {
		paths[p.path] = p.serve
	}
	paths["/"] = func(w http.ResponseWriter, _ *http.Request) { index(w, pages) }
	return exact(paths)
}

// write writes an answer. A client that is gone does not read it.
func write(w io.Writer, s string) { _, _ = io.WriteString(w, s) }

func index(w http.ResponseWriter, pages []page) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	var b strings.Builder
	b.WriteString("<!DOCTYPE html>\n<title>ztun</title>\n<h1>ztun</h1>\n<table>\n")
	for _, p := range pages {
		name := html.EscapeString(p.path)
		fmt.Fprintf(&b, "<tr><td><a href=%q>%s</a><td>%s\n", strings.TrimPrefix(name, "/"), name, html.EscapeString(p.meaning))
	}
	b.WriteString("</table>\n")
	write(w, b.String())
}

// debug serves what f returns as JSON.
func (s *Server) debug(f func() any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, f()) }
}

func writeJSON(w http.ResponseWriter, v any) {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(data, '\n')) // as in write
}

func (s *Server) quit(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	s.cfg.Log.Info("asked to end", "by", r.RemoteAddr)
	write(w, "shutdown now\n")
	s.cfg.Shutdown()
}

const loggingUsage = `
usage: POST /logging                          show the log level
usage: POST /logging?level=<level>            change the level of everything that has none of its own
usage: POST /logging?level=<target>=<level>   change the level of a target; several are separated by commas
usage: POST /logging?reset                    back to the levels of the start, before those of level= are set
usage: POST /logging?level=<...>&for=<time>   change it back after a time such as 10m
levels: error, warn, info, debug, trace, off
`

// maxRevert is the longest time of for=.
const maxRevert = 24 * time.Hour

func (s *Server) logging(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.WriteHeader(http.StatusMethodNotAllowed)
		write(w, "Invalid HTTP method\n"+loggingUsage)
		return
	}
	q := r.URL.Query()
	level, reset := q.Get("level"), q.Has("reset")
	if level != "" || reset {
		var back time.Duration
		if v := q.Get("for"); v != "" {
			d, err := time.ParseDuration(v)
			if err != nil || d <= 0 || d > maxRevert {
				w.WriteHeader(http.StatusBadRequest)
				write(w, fmt.Sprintf("Invalid time provided: %q: want one such as 10m, at most 24h\n%s", v, loggingUsage))
				return
			}
			back = d
		}
		undo, err := s.cfg.Levels.Change(level, reset)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			write(w, fmt.Sprintf("Invalid level provided: %q: %s\n%s", level, err, loggingUsage))
			return
		}
		s.cfg.Log.Info("log level changed", "level", s.cfg.Levels.String(), "by", r.RemoteAddr)
		if back > 0 {
			s.revert(undo, back)
		}
	}
	write(w, fmt.Sprintf("current log level is %s\n", s.cfg.Levels))
}

// revert puts a level back after a time, unless the end comes first.
func (s *Server) revert(undo func(), after time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return
	}
	s.reverts.Go(func() {
		select {
		case <-s.ended:
		case <-s.cfg.After(after):
			undo()
		}
	})
}

// sortedBy sorts a list by a text, and returns it; never nil, which JSON writes as null.
func sortedBy[T any](list []T, key func(T) string) []T {
	if list == nil {
		return []T{}
	}
	slices.SortStableFunc(list, func(a, b T) int { return strings.Compare(key(a), key(b)) })
	return list
}
