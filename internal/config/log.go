package config

import (
	"errors"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
)

// LogFormat is how log lines are written.
type LogFormat uint8

// The formats.
const (
	LogPlain LogFormat = iota
	LogJSON
)

func (f LogFormat) String() string {
	if f == LogJSON {
		return "json"
	}
	return "plain"
}

// A formatValue takes any text: what is not json is plain, as in ztunnel.
type formatValue LogFormat

func (v *formatValue) Set(s string) error {
	*v = formatValue(LogPlain)
	if s == "json" {
		*v = formatValue(LogJSON)
	}
	return nil
}

func (*formatValue) kind() string { return "string" }

// Levels beside those of slog.
const (
	LevelTrace = slog.LevelDebug - 4
	LevelOff   = slog.Level(math.MaxInt32) // above everything that is logged
)

var levels = map[string]slog.Level{
	"off": LevelOff, "error": slog.LevelError, "warn": slog.LevelWarn, "info": slog.LevelInfo, "debug": slog.LevelDebug, "trace": LevelTrace,
}

// A LogFilter says from which level on a target is logged. The zero value logs everything at info, as the default does.
type LogFilter struct {
	Default slog.Level
	Targets map[string]slog.Level
}

// Level is the least severe level that is logged for a target: that of the longest name in Targets with which the target begins,
// as in ztunnel, else the default.
func (f *LogFilter) Level(target string) slog.Level {
	level, longest := f.Default, -1
	for name, l := range f.Targets {
		if strings.HasPrefix(target, name) && len(name) > longest {
			level, longest = l, len(name)
		}
	}
	return level
}

// String is the form in which it is set.
func (f *LogFilter) String() string {
	parts := []string{levelName(f.Default)}
	for _, t := range slices.Sorted(maps.Keys(f.Targets)) {
		parts = append(parts, t+"="+levelName(f.Targets[t]))
	}
	return strings.Join(parts, ",")
}

func levelName(l slog.Level) string {
	for name, known := range levels {
		if known == l {
			return name
		}
	}
	return l.String()
}

// Set reads directives separated by commas: a level, or target=level. Without a level of its own the default is error, as in ztunnel.
// Filters by span or field are not known here.
func (f *LogFilter) Set(s string) error {
	next := LogFilter{Default: slog.LevelError}
	if strings.TrimSpace(s) == "" {
		return errLogFilter
	}
	for part := range strings.SplitSeq(s, ",") {
		target, name, targeted := strings.Cut(strings.TrimSpace(part), "=")
		if !targeted {
			name = target
		}
		l, ok := levels[strings.ToLower(name)]
		switch {
		case !ok, targeted && (target == "" || strings.ContainsAny(target, "[]{} ")):
			return errLogFilter
		case !targeted:
			next.Default = l
		case next.Targets == nil:
			next.Targets = map[string]slog.Level{target: l}
		default:
			next.Targets[target] = l
		}
	}
	*f = next
	return nil
}

var errLogFilter = errors.New("want a level (off, error, warn, info, debug, trace) and target=level, separated by commas, such as info,access=debug")

func (*LogFilter) kind() string { return "filter" }
