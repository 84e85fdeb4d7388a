package tun

import (
	"errors"
	"slices"
)

// An undo list holds what takes back the steps done so far.
type undo []func() error

func (u *undo) add(f func() error) { *u = append(*u, f) }

// run takes back all steps, the latest first. It goes on after an error: as much as can be is taken back.
func (u *undo) run() error {
	var errs []error
	for i := range slices.Backward(*u) {
		errs = append(errs, (*u)[i]())
	}
	*u = nil
	return errors.Join(errs...)
}
