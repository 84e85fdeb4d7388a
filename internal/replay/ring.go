package replay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A RingConfig says which files a Ring writes. Path, Files and Bytes are required.
type RingConfig struct {
	Path  string        // of the files: -000001 and so on comes before its extension
	Files int           // that are kept, at least 2
	Bytes int64         // of a file, at which the next one begins
	Every time.Duration // from a file's first packet on, after which the next one begins; 0: its size alone counts
}

// A Ring writes what a [Writer] has made to files, each of them a whole capture, and removes the oldest when there are too many. It never
// overwrites a file.
type Ring struct {
	cfg    RingConfig
	file   *os.File
	number int      // of files so far
	kept   []string // oldest first

	block  []byte // as much of one as has come
	header []byte // the section, and its interfaces
	size   int64  // of the file
	filled bool   // it has a packet
	first  uint64 // time of that, in nanoseconds since 1970
}

// NewRing checks the configuration and creates the first file.
func NewRing(cfg RingConfig) (*Ring, error) {
	switch {
	case cfg.Path == "":
		return nil, errors.New("replay: ring: config: Path is required")
	case cfg.Files < 2:
		return nil, fmt.Errorf("replay: ring: config: Files: %d is less than 2", cfg.Files)
	case cfg.Bytes <= 0:
		return nil, fmt.Errorf("replay: ring: config: Bytes: %d is not positive", cfg.Bytes)
	}
	r := &Ring{cfg: cfg}
	return r, r.create()
}

// maxRingBlock is more than a block of a Writer has.
const maxRingBlock = 1 << 20

// Write takes the next bytes of the stream.
func (r *Ring) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		want := ngMinimum
		if len(r.block) >= ngMinimum {
			if want = int(binary.LittleEndian.Uint32(r.block[4:])); want < ngMinimum || want > maxRingBlock {
				return 0, fmt.Errorf("replay: ring: a block of %d bytes: the stream is not that of a ztun", want)
			}
		}
		n := min(len(rest), want-len(r.block))
		r.block, rest = append(r.block, rest[:n]...), rest[n:]
		if len(r.block) < ngMinimum || len(r.block) < int(binary.LittleEndian.Uint32(r.block[4:])) {
			continue
		}
		if err := r.whole(r.block); err != nil {
			return 0, err
		}
		r.block = r.block[:0]
	}
	return len(p), nil
}

// whole writes a block, to the next file if it is time for that.
func (r *Ring) whole(b []byte) error {
	switch binary.LittleEndian.Uint32(b) {
	case ngSection:
		r.header = append(r.header[:0], b...)
	case ngInterface:
		r.header = append(r.header, b...)
	case ngPacket:
		if len(b) < ngMinimum+20 {
			return fmt.Errorf("replay: ring: a packet block of %d bytes: the stream is not that of a ztun", len(b))
		}
		at := uint64(binary.LittleEndian.Uint32(b[12:]))<<32 | uint64(binary.LittleEndian.Uint32(b[16:]))
		if r.filled && (r.size+int64(len(b)) > r.cfg.Bytes || r.cfg.Every > 0 && at-r.first >= uint64(r.cfg.Every) && at > r.first) {
			if err := r.next(); err != nil {
				return err
			}
		}
		if !r.filled {
			r.filled, r.first = true, at
		}
	}
	return r.put(b)
}

func (r *Ring) put(b []byte) error {
	n, err := r.file.Write(b)
	r.size += int64(n)
	if err != nil {
		return fmt.Errorf("replay: ring: %w", err)
	}
	return nil
}

// next begins another file.
func (r *Ring) next() error {
	if err := r.Close(); err != nil {
		return err
	}
	if err := r.create(); err != nil {
		return err
	}
	return r.put(r.header)
}

func (r *Ring) create() (err error) {
	r.number++
	ext := filepath.Ext(r.cfg.Path)
	name := fmt.Sprintf("%s-%06d%s", strings.TrimSuffix(r.cfg.Path, ext), r.number, ext)
	r.file, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	switch {
	case errors.Is(err, fs.ErrExist):
		return fmt.Errorf("replay: ring: %s is there already: remove it, or name another file", name)
	case err != nil:
		return fmt.Errorf("replay: ring: %w", err)
	}
	r.size, r.filled = 0, false
	if r.kept = append(r.kept, name); len(r.kept) > r.cfg.Files {
		err = os.Remove(r.kept[0])
		r.kept = slices.Delete(r.kept, 0, 1)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replay: ring: %w", err)
	}
	return nil
}

// Close closes the file that is being written.
func (r *Ring) Close() error {
	if err := r.file.Close(); err != nil {
		return fmt.Errorf("replay: ring: %w", err)
	}
	return nil
}
