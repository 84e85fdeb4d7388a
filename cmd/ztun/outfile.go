package main

import (
	"bufio"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// An outFile is a file that comes to be in whole or not at all: what is written goes to another one beside it, which takes its name at the
// end. Some are written to as they are: what is no regular file, as a named pipe; what is open already, as /dev/stdout, whatever it leads to;
// and a file in a directory that takes no other.
type outFile struct {
	*bufio.Writer
	file  *os.File
	name  string // that it gets; "": it has it
	empty bool   // if it is not to be kept, nothing stays in it
	lent  bool   // others go on to write to it
}

func newOutFile(file *os.File) *outFile {
	return &outFile{Writer: bufio.NewWriterSize(file, 256<<10), file: file}
}

func createFile(name string) (*outFile, error) {
	info, err := os.Stat(name)
	if err == nil {
		for _, own := range []*os.File{os.Stdout, os.Stderr} {
			if open, err := own.Stat(); err == nil && os.SameFile(open, info) {
				f := newOutFile(own) // opened once more it would begin at its first byte, where the other text is
				f.lent = true
				return f, nil
			}
		}
		if !info.Mode().IsRegular() || isDescriptor(name) {
			file, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
			if err != nil {
				return nil, err
			}
			return newOutFile(file), nil
		}
	}
	mode := fs.FileMode(0o644)
	if err == nil {
		mode = info.Mode().Perm()
	}
	at := place(name)
	file, err := os.OpenFile(filepath.Join(filepath.Dir(at), ".ztun-"+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err == nil {
		f := newOutFile(file)
		f.name = at
		return f, nil
	}
	if info != nil {
		if file, err := os.OpenFile(name, os.O_WRONLY|os.O_TRUNC, 0); err == nil {
			f := newOutFile(file)
			f.empty = true
			return f, nil
		}
	}
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		path.Path = name // nobody knows the other
	}
	return nil, err
}

// isDescriptor reports whether a name is that of an open file of a process, as /dev/fd/3 is: a link that leads below /proc.
func isDescriptor(name string) bool {
	for range 40 { // MAXSYMLINKS of Linux
		dir, err := filepath.EvalSymlinks(filepath.Dir(name))
		if err != nil {
			return false
		}
		if strings.HasPrefix(dir+"/", "/proc/") {
			return true
		}
		to, err := os.Readlink(name)
		if err != nil {
			return false
		}
		if name = to; !filepath.IsAbs(to) {
			name = filepath.Join(dir, to)
		}
	}
	return false
}

// finish ends the file, and removes it unless it is to be kept and was written.
func (f *outFile) finish(keep bool) error {
	err := f.Flush()
	if f.empty && (!keep || err != nil) {
		err = errors.Join(err, f.file.Truncate(0))
	}
	if !f.lent {
		err = errors.Join(err, f.file.Close())
	}
	if f.name == "" {
		return err
	}
	if keep && err == nil {
		if err = os.Rename(f.file.Name(), f.name); err == nil {
			return nil
		}
		// As what is mounted by itself, whose place nothing else can take.
		if failed := copyFile(f.name, f.file.Name()); failed != nil {
			err = errors.Join(err, failed)
		} else {
			err = nil
		}
	}
	return errors.Join(err, os.Remove(f.file.Name()))
}

// copyFile gives a file that is there the content of another.
func copyFile(to, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
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
