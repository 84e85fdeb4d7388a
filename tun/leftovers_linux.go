package tun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// statePattern is the form of the names of state files: device and inode number of the netns.
const statePattern = "netns-%d-%d.json"

// A Leftover is a netns whose earlier values are kept: one that is captured, by this process or by one that has died.
type Leftover struct {
	Dev, Ino uint64 // of the netns, see [Netns.ID]
	UID      string // of the pod
	Path     string // of the file
}

// Leftovers lists what is kept in stateDir, in the order of the file names. A start finds there the pods that a dead process
// has left captured; those that are still wanted are adopted by [Open], the others stay closed until [Remove]. A file may
// outlive its netns, and then another netns may have its numbers: only Open and Remove can tell, by what is set up there.
//
// A directory that does not exist has none. Files that cannot be read are named in err; list has the others.
func Leftovers(stateDir string) (list []Leftover, err error) {
	if stateDir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(stateDir) // sorted by name
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("tun: leftovers: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		l := Leftover{Path: filepath.Join(stateDir, entry.Name())}
		n, _ := fmt.Sscanf(entry.Name(), statePattern, &l.Dev, &l.Ino)
		if n != 2 || entry.Name() != fmt.Sprintf(statePattern, l.Dev, l.Ino) {
			continue // another file, or one that is being written
		}
		st, err := loadState(l.Path)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("tun: leftovers: %w", err))
		case st != nil: // it may have gone meanwhile
			l.UID = st.UID
			list = append(list, l)
		}
	}
	return list, errors.Join(errs...)
}
