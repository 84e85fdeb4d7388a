package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// What is written to a file that is open already, as standard output, stands beside what others write there.
func TestOutFileThatIsOpenAlready(t *testing.T) {
	capture := filepath.Join(replaySamples, "mesh-http.pcap")
	args := []string{"replay", "--state", filepath.Join(replaySamples, "mesh.yaml"), "--report"}
	for _, name := range []string{"/dev/stdout", "/dev/stderr", "/dev/fd/1", "/proc/self/fd/1", "/dev/fd/3", "a link", "its own name"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file, err := os.Create(filepath.Join(dir, "out.txt"))
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			before := "" // of a shell that has written there
			if name != "/dev/fd/3" {
				before = "before\n"
			}
			if _, err := file.WriteString(before); err != nil {
				t.Fatal(err)
			}
			switch name {
			case "a link":
				name = filepath.Join(dir, "link")
				if err := os.Symlink("/dev/stdout", name); err != nil {
					t.Fatal(err)
				}
				defer func() { _ = os.Remove(name) }()
			case "its own name":
				name = file.Name()
			}
			cmd := exec.CommandContext(t.Context(), "ztun", append(args, name, capture)...)
			switch name {
			case "/dev/stderr":
				cmd.Stdout, cmd.Stderr = file, file
			case "/dev/fd/3":
				cmd.ExtraFiles = []*os.File{file}
			default:
				cmd.Stdout = file
			}
			if err := cmd.Run(); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 1<<16)
			n, err := file.ReadAt(b, 0) // of this file, not of another one with its name
			if b = b[:n]; !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			text, report, ok := strings.Cut(string(b), "{\n")
			if !ok || !json.Valid([]byte("{\n"+report)) || !strings.HasPrefix(text, before) {
				t.Errorf("--report %s: %q, want what was there and a report at the end", name, b)
			}
			if cmd.Stdout != nil && !strings.Contains(text, "30 packets; flows: ") {
				t.Errorf("--report %s: %q, want the text as well", name, b)
			}
			if list, err := filepath.Glob(filepath.Join(dir, ".ztun-*")); err != nil || len(list) > 0 {
				t.Errorf("left behind: %v, %v", list, err)
			}
		})
	}
}

// asNobody is the thread without what root may do with files, if this is root.
func asNobody(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		return
	}
	runtime.LockOSThread()
	if err := syscall.Setfsuid(65534); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Setfsuid(0); err != nil {
			t.Error(err) // and the thread ends with the goroutine
			return
		}
		runtime.UnlockOSThread()
	})
}

// A file that can be written to is, also if its directory takes no other one.
func TestOutFileInADirectoryThatIsNotWritable(t *testing.T) {
	for _, tt := range []struct {
		name string
		mode fs.FileMode // 0: there is none
		keep bool
		err  error
		want string
	}{
		{"a file", 0o666, true, nil, "new"},
		{"a file of a run that fails", 0o666, false, nil, ""},
		{"a file that is not writable", 0o444, true, fs.ErrPermission, "old"},
		{"no file", 0, true, fs.ErrPermission, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			name := filepath.Join(dir, "out.json")
			if tt.mode != 0 {
				if err := errors.Join(os.WriteFile(name, []byte("old"), tt.mode), os.Chmod(name, tt.mode)); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o555)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.Chmod(dir, 0o755) }) // so that it can be removed
			asNobody(t)
			f, err := createFile(name)
			if !errors.Is(err, tt.err) {
				t.Fatalf("createFile: %v, want %v", err, tt.err)
			}
			if err == nil {
				_, _ = fmt.Fprint(f, "new") // finish tells
				if err := f.finish(tt.keep); err != nil {
					t.Errorf("finish(%v): %v", tt.keep, err)
				}
			} else if !strings.Contains(err.Error(), name) {
				t.Errorf("createFile: %v, want the name in it", err)
			}
			if b, err := os.ReadFile(name); string(b) != tt.want || err != nil && tt.mode != 0 {
				t.Errorf("the file has %q, %v; want %q", b, err, tt.want)
			}
		})
	}
}

// Where the other file cannot take the name, as that of a mount point or on another file system, its content is copied.
func TestOutFileThatCannotBeRenamed(t *testing.T) {
	const memory = "/dev/shm"
	dir := t.TempDir()
	var a, b syscall.Stat_t
	if syscall.Stat(memory, &a) != nil || syscall.Stat(dir, &b) != nil || a.Dev == b.Dev {
		t.Skip("there is no other file system in " + memory)
	}
	for _, there := range []bool{true, false} {
		t.Run(fmt.Sprintf("there=%v", there), func(t *testing.T) {
			file, err := os.CreateTemp(memory, "ztun-test-")
			if err != nil {
				t.Skip(err)
			}
			name := filepath.Join(dir, fmt.Sprint(there))
			if there {
				if err := os.WriteFile(name, []byte("something longer"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			f := newOutFile(file)
			f.name = name
			_, _ = fmt.Fprint(f, "new") // finish tells
			if err := f.finish(true); (err == nil) != there {
				t.Errorf("finish: %v", err)
			}
			if got, err := os.ReadFile(name); there && string(got) != "new" {
				t.Errorf("%q, %v; want what was written", got, err)
			}
			if _, err := os.Stat(file.Name()); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the other file is left: %v", err)
			}
		})
	}
}
