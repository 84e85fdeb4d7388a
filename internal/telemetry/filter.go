package telemetry

import (
	"errors"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
)

// Levels beside those of slog.
const (
	LevelTrace = slog.LevelDebug - 4
	LevelOff   = slog.Level(math.MaxInt32) // above everything that is logged
)

var levels = map[string]slog.Level{
	"off": LevelOff, "error": slog.LevelError, "warn": slog.LevelWarn, "info": slog.LevelInfo, "debug": slog.LevelDebug, "trace": LevelTrace,
}

// AccessTarget is the target of the access log.
const AccessTarget = "access"

// crate is what ztunnel puts before the names of its own targets, which do not include access.
const crate = "ztunnel"

// A Filter says from which level on a target is logged. The zero value logs everything at info, as the default does.
type Filter struct {
	Default slog.Level
	Targets map[string]slog.Level
}

// Level is the least severe level that is logged for a target: that of the longest name in Targets with which the target begins,
// as in ztunnel, else the default. The target proxy is ztunnel::proxy as well.
func (f *Filter) Level(target string) slog.Level {
	level, longest := f.Default, -1
	for name, l := range f.Targets {
		n := len(name)
		if target != AccessTarget {
			if name == crate {
				name = ""
			} else if own, ok := strings.CutPrefix(name, crate+"::"); ok {
				name = own
			}
		}
		if strings.HasPrefix(target, name) && n > longest {
			level, longest = l, n
		}
	}
	return level
}

// String is the form in which it is set.
func (f *Filter) String() string {
	parts := []string{LevelName(f.Default)}
	for _, t := range slices.Sorted(maps.Keys(f.Targets)) {
		parts = append(parts, t+"="+LevelName(f.Targets[t]))
	}
	return strings.Join(parts, ",")
}

// LevelName is the name of a level in filters and lines.
func LevelName(l slog.Level) string {
	for name, known := range levels {
		if known == l {
			return name
		}
	}
	return strings.ToLower(l.String())
}

// Set reads directives separated by commas: a level, or target=level. Without a level of its own the default is error, as in ztunnel.
// Filters by span or field are not known here.
func (f *Filter) Set(s string) error {
	next := Filter{Default: slog.LevelError}
	if err := next.append(s, "="); err != nil {
		return err
	}
	*f = next
	return nil
}

// With is the filter with more directives, the last of which wins for a target. They may be written target:level, too, as
// istioctl's help has it.
func (f *Filter) With(s string) (Filter, error) {
	next := Filter{Default: f.Default, Targets: maps.Clone(f.Targets)}
	if err := next.append(s, "=:"); err != nil {
		return Filter{}, err
	}
	return next, nil
}

// append adds directives; a target ends at the last of the separators.
func (f *Filter) append(s, separators string) error {
	if strings.TrimSpace(s) == "" {
		return errFilter
	}
	for part := range strings.SplitSeq(s, ",") {
		name, target, targeted := strings.TrimSpace(part), "", false
		if i := strings.LastIndexAny(name, separators); i >= 0 {
			target, name, targeted = name[:i], name[i+1:], true
		}
		l, ok := levels[strings.ToLower(name)]
		switch {
		case !ok, targeted && (target == "" || strings.ContainsAny(target, "[]{}= ") || strings.HasSuffix(target, ":")):
			return errFilter
		case !targeted:
			f.Default = l
		case f.Targets == nil:
			f.Targets = map[string]slog.Level{target: l}
		default:
			f.Targets[target] = l
		}
	}
	return nil
}

var errFilter = errors.New("want a level (off, error, warn, info, debug, trace) and target=level, separated by commas, such as info,access=debug")
