package tun

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// A state is what has to be known to leave a netns as it was found, and cannot be read from it afterwards.
type state struct {
	UID     string   `json:"uid"`
	Sysctls []sysctl `json:"sysctls"`          // values before the first change, in the order of the changes
	Clsact  []string `json:"clsact,omitempty"` // interfaces that had such a qdisc before
}

// statePath returns the file of a netns, or "" when none is kept.
func statePath(cfg *Config) string {
	if cfg.StateDir == "" {
		return ""
	}
	dev, ino := cfg.Netns.ID()
	return filepath.Join(cfg.StateDir, fmt.Sprintf(statePattern, dev, ino))
}

// loadState returns nil where no state is kept.
func loadState(path string) (*state, error) {
	if path == "" {
		return nil, nil
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("earlier values: %w", err)
	}
	st := new(state)
	if err := json.Unmarshal(b, st); err != nil {
		return nil, fmt.Errorf("earlier values: %s: %w; remove the file to go on without them", path, err)
	}
	return st, nil
}

// save replaces the file at once, or not at all.
func (st *state) save(path string) error {
	if path == "" {
		return nil
	}
	b, err := json.MarshalIndent(st, "", "\t")
	if err != nil {
		return fmt.Errorf("earlier values: %w", err)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("earlier values: %w", err)
	}
	f, err := os.CreateTemp(dir, ".netns-*")
	if err != nil {
		return fmt.Errorf("earlier values: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("earlier values: %w", err)
	}
	return syncDir(dir)
}

// syncDir makes a rename last.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("earlier values: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("earlier values: %s: %w", dir, err)
	}
	return nil
}

func removeState(path string) error {
	if path == "" {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("earlier values: %w", err)
	}
	return nil
}

// keepState notes the values before the first change, and writes them down. What an earlier start noted wins, provided
// that what it set up is still there: an inode number that is used again brings the file of another netns. Where an earlier
// start has set up something and its file is lost, nothing is noted: the values are ztun's own by now.
func (s *setup) keepState() error {
	path := statePath(&s.cfg)
	earlier, err := loadState(path)
	if err != nil {
		return err
	}
	shared, _ := s.sysctls()
	for _, c := range shared {
		now, err := s.proc.read(c.Name)
		if err != nil {
			return err
		}
		s.before = append(s.before, sysctl{c.Name, now})
	}
	if earlier == nil && s.leftovers {
		s.log.Warn("the values that sysctls had before the earlier start are not known; an end of the capture will leave them as they are", "file", path)
		return nil
	}
	fresh := !s.leftovers
	if fresh {
		earlier = &state{Clsact: s.clsactBefore}
	}
	earlier.UID = s.cfg.UID
	for _, c := range s.before {
		if !slices.ContainsFunc(earlier.Sysctls, func(e sysctl) bool { return e.Name == c.Name }) {
			earlier.Sysctls = append(earlier.Sysctls, c)
		}
	}
	if err := earlier.save(path); err != nil {
		return err
	}
	s.state = earlier
	if fresh {
		s.undo.add(func() error { return removeState(path) })
	}
	return nil
}
