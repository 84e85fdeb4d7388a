package admin

import (
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Readiness knows what holds a node back from being ready. Its methods may be called from any goroutine.
type Readiness struct {
	log   *slog.Logger
	now   func() time.Time
	start time.Time

	mu    sync.Mutex // guards below
	tasks map[string]*Task
}

// NewReadiness returns one that is ready: it has no tasks.
func NewReadiness(now func() time.Time, log *slog.Logger) *Readiness {
	return &Readiness{log: log, now: now, start: now(), tasks: make(map[string]*Task)}
}

// A Task is something that has to be there before the node is ready.
type Task struct {
	r      *Readiness
	name   string
	reason func() []string
	done   bool // guarded by r.mu
}

// Add adds a task, which is pending until Done. reason says why, a line for each thing; a line stands in the answer also of a task that is
// done, as what is not right and does not hold the node back. It may be nil, and is called by any goroutine, without locks.
// Names are those of ztunnel where it has one: state manager, proxy, dns proxy, workload proxy manager. Each is added once.
func (r *Readiness) Add(name string, reason func() []string) *Task {
	t := &Task{r: r, name: name, reason: reason}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tasks[name] = t
	return t
}

// Done completes the task.
func (t *Task) Done() {
	r := t.r
	r.mu.Lock()
	was := t.done
	t.done = true
	waiting := 0
	for _, o := range r.tasks {
		if !o.done {
			waiting++
		}
	}
	r.mu.Unlock()
	switch {
	case was:
	case waiting > 0:
		r.log.Info("task complete", "task", t.name, "after", r.now().Sub(r.start), "awaiting", waiting)
	default:
		r.log.Info("task complete, marking server ready", "task", t.name, "after", r.now().Sub(r.start))
	}
}

// Undo makes the task pending again.
func (t *Task) Undo() {
	r := t.r
	r.mu.Lock()
	was := t.done
	t.done = false
	r.mu.Unlock()
	if was {
		r.log.Warn("no longer ready", "task", t.name)
	}
}

// state is whether the node is ready, and the text that says so: ztunnel's line first, then one for each reason.
func (r *Readiness) state() (ready bool, body string) {
	r.mu.Lock()
	tasks := make([]*Task, 0, len(r.tasks))
	var pending []string
	for _, t := range r.tasks {
		tasks = append(tasks, t)
		if !t.done {
			pending = append(pending, t.name)
		}
	}
	r.mu.Unlock()
	slices.SortFunc(tasks, func(a, b *Task) int { return strings.Compare(a.name, b.name) })
	slices.Sort(pending)
	var b strings.Builder
	if len(pending) == 0 {
		b.WriteString("ready\n")
	} else {
		fmt.Fprintf(&b, "not ready, pending: %s\n", strings.Join(pending, ", "))
	}
	for _, t := range tasks {
		if t.reason == nil {
			continue
		}
		for _, line := range t.reason() {
			fmt.Fprintf(&b, "%s: %s\n", t.name, strings.ReplaceAll(line, "\n", " "))
		}
	}
	return len(pending) == 0, b.String()
}

// Ready reports whether no task is pending.
func (r *Readiness) Ready() bool {
	ready, _ := r.state()
	return ready
}

func (r *Readiness) serve(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodGet {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	ready, body := r.state()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if !ready {
		w.WriteHeader(http.StatusInternalServerError)
	}
	write(w, body)
}
