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
	data, err := os.ReadFile(path)
	if err == nil {
		var m tun.Marks
		if err := json.Unmarshal(data, &m); err != nil || m.Own == 0 || m.Deliver == 0 || m.Own == m.Deliver || (m.Own|m.Deliver)&^m.OwnMask != 0 {
			return tun.Marks{}, fmt.Errorf("marks: %s is damaged; remove it (running pods are captured anew)", path)
		}
		return m, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return tun.Marks{}, fmt.Errorf("marks: %w", err)
	}
	m := tun.Marks{OwnMask: tun.DefaultMarkMask}
	for m.Own == m.Deliver || m.Own == 0 || m.Deliver == 0 {
		r := random()
		m.Own, m.Deliver = uint32(r)&m.OwnMask, uint32(r>>32)&m.OwnMask
	}
	if data, err = json.Marshal(m); err != nil {
		return tun.Marks{}, fmt.Errorf("marks: %w", err)
	}
	// Whole or not at all: the file is written beside and renamed.
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return tun.Marks{}, fmt.Errorf("marks: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return tun.Marks{}, fmt.Errorf("marks: %w", err)
	}
	return m, nil
}
