package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"ztun.dev/ztun/internal/telemetry"
)

// A value reads itself from text. Errors say what is wanted; the caller adds what was given and where.
type value interface {
	Set(s string) error
	kind() string
}

type stringValue string

func str(p *string) *stringValue { return (*stringValue)(p) }

func (v *stringValue) Set(s string) error {
	*v = stringValue(s)
	return nil
}

func (*stringValue) kind() string { return "string" }

// A domainValue is a DNS suffix, kept in lower case and without dots around it.
type domainValue string

func (v *domainValue) Set(s string) error {
	s = strings.ToLower(strings.TrimSuffix(s, "."))
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 {
			return errors.New("want a domain name such as cluster.local")
		}
	}
	*v = domainValue(s)
	return nil
}

func (*domainValue) kind() string { return "domain" }

type boolValue bool

func (v *boolValue) Set(s string) error {
	if s != "true" && s != "false" {
		return errors.New("want true or false")
	}
	*v = s == "true"
	return nil
}

func (*boolValue) kind() string { return "bool" }

// A durationValue is not negative; in a range of positive ones, not zero either.
type durationValue time.Duration

func (v *durationValue) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return errors.New("want a duration such as 5s, 1m30s or 500ms")
	}
	*v = durationValue(d)
	return nil
}

func (*durationValue) kind() string { return "duration" }

type positiveValue struct{ *durationValue }

func positive(p *time.Duration) positiveValue { return positiveValue{(*durationValue)(p)} }

func (v positiveValue) Set(s string) error {
	var d durationValue
	if err := d.Set(s); err != nil {
		return err
	}
	if d == 0 {
		return errors.New("want a duration above zero")
	}
	*v.durationValue = d
	return nil
}

// An intValue is a whole number within limits.
type intValue struct {
	min, max uint64
	set      func(uint64)
}

func uint16In(p *uint16, low uint64) intValue {
	return intValue{low, math.MaxUint16, func(n uint64) { *p = uint16(n) }}
}

func uint32In(p *uint32, low, high uint64) intValue {
	return intValue{low, high, func(n uint64) { *p = uint32(n) }}
}

func (v intValue) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n < v.min || n > v.max {
		return fmt.Errorf("want a number from %d to %d", v.min, v.max)
	}
	v.set(n)
	return nil
}

func (intValue) kind() string { return "number" }

// A sizeValue is a number of bytes, also as KiB or MiB.
type sizeValue struct{ intValue }

func size(p *uint32, low, high uint64) sizeValue { return sizeValue{uint32In(p, low, high)} }

func (v sizeValue) Set(s string) error {
	digits, shift := s, 0
	if d, ok := strings.CutSuffix(s, "KiB"); ok {
		digits, shift = d, 10
	} else if d, ok := strings.CutSuffix(s, "MiB"); ok {
		digits, shift = d, 20
	}
	n, err := strconv.ParseUint(digits, 10, 32) // shifted, it still fits in 64 bits
	if n <<= shift; err != nil || n < v.min || n > v.max {
		return fmt.Errorf("want a size from %d to %d bytes, such as 65536, 64KiB or 4MiB", v.min, v.max)
	}
	v.set(n)
	return nil
}

func (sizeValue) kind() string { return "size" }

// A lenientBool is true only for the word true in any case, as in ztunnel.
type lenientBool bool

func (v *lenientBool) Set(s string) error {
	*v = lenientBool(strings.EqualFold(s, "true"))
	return nil
}

func (*lenientBool) kind() string { return "bool" }

func boolean(p *bool) *boolValue { return (*boolValue)(p) }

// size64 is a size that may be above 4 GiB.
func size64(p *uint64, low, high uint64) sizeValue {
	return sizeValue{intValue{low, high, func(n uint64) { *p = n }}}
}

// A secondsValue is a whole number of seconds; an empty one is 0.
type secondsValue struct{ p *uint32 }

func (v secondsValue) Set(s string) error {
	if s == "" {
		*v.p = 0
		return nil
	}
	return uint32In(v.p, 0, math.MaxInt32).Set(s)
}

func (secondsValue) kind() string { return "seconds" }

// A rootsValue is a path, PEM text or the word SYSTEM. What is meant to be PEM has to look like it: a mistyped path would else be a store
// without roots.
type rootsValue string

func (v *rootsValue) Set(s string) error {
	if strings.Contains(s, "-----") && !strings.Contains(s, "-----BEGIN CERTIFICATE-----") {
		return errors.New("want a path, SYSTEM, or certificates as PEM")
	}
	if s == "" {
		return errors.New("want a path, SYSTEM, or certificates as PEM; nothing would be trusted")
	}
	*v = rootsValue(s)
	return nil
}

func (*rootsValue) kind() string { return "roots" }

// A formatValue takes any text: what is not json is plain, as in ztunnel.
type formatValue telemetry.Format

func (v *formatValue) Set(s string) error {
	*v = formatValue(telemetry.Plain)
	if s == "json" {
		*v = formatValue(telemetry.JSON)
	}
	return nil
}

func (*formatValue) kind() string { return "string" }

type filterValue telemetry.Filter

func (v *filterValue) Set(s string) error { return (*telemetry.Filter)(v).Set(s) }

func (*filterValue) kind() string { return "filter" }
