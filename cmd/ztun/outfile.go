package main

import (
	"bufio"
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// An outFile is a file that comes to be in whole or not at all: what is written goes to another one beside it, which takes its name at the
// end. What is no regular file, as a named pipe, is written to as it is.
type outFile struct {
	*bufio.Writer
	file *os.File
	name string // that it gets; "": it has it
}

func createFile(name string) (*outFile, error) {
	info, err := os.Stat(name)
	mode := fs.FileMode(0o644)
	if err == nil {
		if mode = info.Mode(); !mode.IsRegular() {
			file, err := os.OpenFile(name, os.O_WRONLY, 0)
			if err != nil {
				return nil, err
			}
			return &outFile{bufio.NewWriterSize(file, 256<<10), file, ""}, nil
		}
	}
	name = place(name)
	file, err := os.OpenFile(filepath.Join(filepath.Dir(name), ".ztun-"+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode.Perm())
	if err != nil {
		if path, ok := errors.AsType[*fs.PathError](err); ok {
			path.Path = name // nobody knows the other
		}
		return nil, err
	}
	return &outFile{bufio.NewWriterSize(file, 256<<10), file, name}, nil
}

// finish ends the file, and removes it unless it is to be kept and was written.
func (f *outFile) finish(keep bool) error {
	err := errors.Join(f.Flush(), f.file.Close())
	switch {
	case f.name == "":
		return err
	case keep && err == nil:
		if err = os.Rename(f.file.Name(), f.name); err == nil {
			return nil
		}
	}
	return errors.Join(err, os.Remove(f.file.Name()))
}

// place is where a file is, or would be, past symbolic links.
func place(name string) string {
	if found, err := filepath.EvalSymlinks(name); err == nil {
		name = found
	} else if dir, err := filepath.EvalSymlinks(filepath.Dir(name)); err == nil {
		name = filepath.Join(dir, filepath.Base(name))
	}
	if abs, err := filepath.Abs(name); err == nil {
		return abs
	}
	return name
}

// sameFile reports whether two names lead to the same file, which need not be there.
func sameFile(a, b string) bool {
	x, errA := os.Stat(a)
	y, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(x, y) || place(a) == place(b)
}
