package config

import (
	"errors"
	"strconv"
	"strings"
)

// Threads says how many threads move bytes. The zero value is automatic.
type Threads struct {
	unit threadsUnit
	n    int
}

type threadsUnit uint8

const (
	threadsAuto threadsUnit = iota
	threadsNumber
	threadsPercent
)

// Count is the number of threads on a machine with so many cores; at least 1.
func (t Threads) Count(cores int) int {
	n := max((cores+3)/4, 2)
	switch {
	case t.unit == threadsNumber && t.n == 0:
		n = cores
	case t.unit == threadsNumber:
		n = t.n
	case t.unit == threadsPercent:
		n = (cores*t.n + 99) / 100
	}
	return max(n, 1)
}

// String is the form in which it is set.
func (t Threads) String() string {
	switch t.unit {
	case threadsNumber:
		return strconv.Itoa(t.n)
	case threadsPercent:
		return strconv.Itoa(t.n) + "%"
	}
	return "auto"
}

type threadsValue Threads // its methods read it

func (v *threadsValue) Set(s string) error {
	if s == "auto" {
		*v = threadsValue{}
		return nil
	}
	digits, percent := strings.CutSuffix(s, "%")
	n, err := strconv.ParseUint(digits, 10, 16)
	switch {
	case err != nil, percent && (n == 0 || n > 100):
		return errors.New("want auto, a number of threads (0 = one per core) or a share of the cores from 1% to 100%")
	case percent:
		*v = threadsValue{threadsPercent, int(n)}
	default:
		*v = threadsValue{threadsNumber, int(n)}
	}
	return nil
}

func (*threadsValue) kind() string { return "threads" }
