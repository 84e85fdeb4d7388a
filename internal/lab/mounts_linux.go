package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// privateMounts gives the calling thread, which has unshared its mount namespace, a resolv.conf. The C library is told to
// look there and nowhere else: neither a resolver behind a socket (nss-resolve, nscd) nor another service of names would ask
// through the namespace's network.
func privateMounts(resolvConf string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if resolvConf == "" {
		return nil
	}
	// The files live in a tmpfs whose own place is taken away again: the binds keep it, and no file is left anywhere.
	dir := os.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=64k"); err != nil {
		return fmt.Errorf("tmpfs on %s: %w", dir, err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	if err := bindFile(dir, "/etc/resolv.conf", resolvConf); err != nil {
		return err
	}
	for _, optional := range []struct{ path, content string }{{"/etc/nsswitch.conf", nsswitch}, {"/run/nscd/socket", ""}} {
		if err := bindFile(dir, optional.path, optional.content); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

const nsswitch = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\nservices: files\n"

// bindFile puts a file with the given content over path, which has to exist.
func bindFile(dir, path, content string) error {
	src := filepath.Join(dir, filepath.Base(path))
	if err := os.WriteFile(src, []byte(content), 0o644); err != nil {
		return err
	}
	if err := unix.Mount(src, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind over %s: %w", path, err)
	}
	return nil
}
