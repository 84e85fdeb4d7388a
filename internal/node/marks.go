package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"ztun.dev/ztun/tun"
)

// loadMarks returns the marks of this node: those of an earlier process, because sockets and rules that it left may have them,
// else new ones. They are drawn at random: who may set marks in a pod and knows ours could leave the mesh.
func loadMarks(dir string, random func() uint64) (tun.Marks, error) {
	path := filepath.Join(dir, "marks.json")
	m := tun.Marks{OwnMask: tun.DefaultMarkMask}
	data, err := os.ReadFile(path)
	switch {
	case err == nil:
		if err := json.Unmarshal(data, &m); err != nil || m.Complete() != nil {
			return tun.Marks{}, fmt.Errorf("marks: %s is damaged; remove it (running pods are captured anew)", path)
		}
		if m.Secret != 0 {
			return m, nil
		}
	case !errors.Is(err, fs.ErrNotExist):
		return tun.Marks{}, fmt.Errorf("marks: %w", err)
	}
	for m.Own == m.Deliver || m.Own == 0 || m.Deliver == 0 {
		r := random()
		m.Own, m.Deliver = uint32(r)&m.OwnMask, uint32(r>>32)&m.OwnMask
	}
	for m.Secret == 0 { // in a file of an earlier version, too
		m.Secret = uint32(random()) &^ (m.OwnMask | tun.ApplicationMark)
	}
	if err := saveMarks(path, m); err != nil {
		return tun.Marks{}, fmt.Errorf("marks: %w", err)
	}
	return m, nil
}

// saveMarks writes the file whole or not at all: beside, and then renamed.
func saveMarks(path string, m tun.Marks) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
