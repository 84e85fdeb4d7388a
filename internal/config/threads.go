package config

import (
	"errors"
	"math"
	"strconv"
	"strings"
)

// Threads says how many threads move bytes. The zero value is automatic.
type Threads struct {
	unit threadsUnit
	n    int

	limit, resourceLimit, request int // cores; 0: not known
}

type threadsUnit uint8

const (
	threadsAuto threadsUnit = iota
	threadsNumber
	threadsPercent
)

// Count is the number of threads on a machine with so many cores; at least 1. A limit of the container counts instead of the machine.
func (t Threads) Count(cores int) int {
	switch {
	case t.resourceLimit > 0:
		cores = t.resourceLimit
	case t.limit > 0:
		cores = t.limit
	}
	n := max((cores+3)/4, t.request, 2)
	switch {
	case t.unit == threadsAuto && t.resourceLimit > 0:
		n = max(t.resourceLimit, t.request)
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
		v.unit, v.n = threadsAuto, 0
		return nil
	}
	digits, percent := strings.CutSuffix(s, "%")
	n, err := strconv.ParseUint(digits, 10, 16)
	switch {
	case err != nil, percent && (n == 0 || n > 100):
		return errors.New("want auto, a number of threads (0 = one per core) or a share of the cores from 1% to 100%")
	case percent:
		v.unit, v.n = threadsPercent, int(n)
	default:
		v.unit, v.n = threadsNumber, int(n)
	}
	return nil
}

func (*threadsValue) kind() string { return "threads" }

// A coresValue is a number of cores above zero, rounded up; with quantity also in the form of Kubernetes, such as 1.5 or 500m. An empty
// one is not known.
type coresValue struct {
	p        *int
	quantity bool
}

func (v coresValue) Set(s string) error {
	if s == "" {
		*v.p = 0
		return nil
	}
	milli, per := s, 1000
	if m, ok := strings.CutSuffix(s, "m"); ok {
		milli, per = m, 1
	}
	if !v.quantity {
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil || n == 0 {
			return errors.New("want a number of cores above zero")
		}
		*v.p = int(n)
		return nil
	}
	f, err := strconv.ParseFloat(milli, 64)
	if err != nil || !(f > 0) || f > math.MaxUint16*1000 || strings.ContainsAny(milli, "xXpPeE_") {
		return errors.New("want a number of cores above zero, such as 2, 1.5 or 500m")
	}
	*v.p = int(math.Ceil(f * float64(per) / 1000))
	return nil
}

func (v coresValue) kind() string {
	if v.quantity {
		return "quantity"
	}
	return "cores"
}
