package replay

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A SourceConfig says what a Source reads.
type SourceConfig struct {
	Paths     []string // files, directories, or "-" for Stdin; read in this order
	Recursive bool     // directories with what is below them
	Stdin     io.Reader
}

// A Problem is something of the input that could not be used.
type Problem struct {
	File string `json:"file"`
	Text string `json:"text"`
}

func (p Problem) String() string { return p.File + ": " + p.Text }

// A Source reads the packets of several captures, one capture after the other. What cannot be used of one is a [Problem], and
// the next one follows.
type Source struct {
	cfg      SourceConfig
	files    []string
	file     *os.File // nil: none, or Stdin
	reader   reader   // nil: none
	name     string
	opened   int // captures, so far
	packets  uint64
	problems []Problem
}

// NewSource looks for the captures. Files of a directory are read in the order of their names; those whose names begin with a dot are
// passed over.
func NewSource(cfg SourceConfig) (*Source, error) {
	s := &Source{cfg: cfg}
	for _, path := range cfg.Paths {
		if path == "-" {
			s.files = append(s.files, path)
			continue
		}
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("replay: %w", err)
		}
		if !info.IsDir() {
			s.files = append(s.files, path)
			continue
		}
		found, err := list(path, cfg.Recursive)
		if err != nil {
			return nil, fmt.Errorf("replay: %w", err)
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("replay: the directory %s has no file", path)
		}
		s.files = append(s.files, found...)
	}
	return s, nil
}

func list(dir string, recursive bool) (files []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case path == dir:
		case strings.HasPrefix(d.Name(), "."), d.IsDir() && !recursive:
			if d.IsDir() {
				return fs.SkipDir
			}
		case d.Type().IsRegular():
			files = append(files, path)
		}
		return nil
	})
	slices.Sort(files)
	return files, err
}

// Files are the captures that have not been begun, "-" for standard input.
func (s *Source) Files() []string { return slices.Clone(s.files) }

// Next reads a packet. It returns io.EOF after the last one.
func (s *Source) Next(p *Packet) error {
	for {
		if s.reader == nil {
			if len(s.files) == 0 {
				return io.EOF
			}
			s.open()
			continue
		}
		err := s.reader.next(p)
		if err == nil {
			s.packets++
			return nil
		}
		if !errors.Is(err, io.EOF) {
			s.problem(err)
		}
		s.Close()
	}
}

// open begins with the next file.
func (s *Source) open() {
	s.name, s.files = s.files[0], s.files[1:]
	s.opened++
	var r io.Reader
	if s.name == "-" {
		s.name, r = "standard input", s.cfg.Stdin
	} else {
		f, err := os.Open(s.name)
		if err != nil {
			s.problem(err)
			return
		}
		s.file, r = f, f
	}
	opened, err := uncompressed(r)
	if err == nil {
		s.reader, err = newReader(opened)
	}
	if err != nil {
		s.problem(err)
		s.Close()
	}
}

// uncompressed looks for the magic number of gzip (RFC 1952, section 2.3.1). Nothing is unpacked ahead.
func uncompressed(r io.Reader) (io.Reader, error) {
	b := bufio.NewReaderSize(r, 64<<10)
	if magic, err := b.Peek(2); err != nil || magic[0] != 0x1f || magic[1] != 0x8b {
		return b, nil //nolint:nilerror // too short for either: the reader says so
	}
	z, err := gzip.NewReader(b)
	if err != nil {
		return nil, &DamageError{0, cutOff(err).Error()}
	}
	return &members{b, z}, nil
}

// members reads the members of a gzip file, one after the other. Package gzip takes anything behind the last one for one more.
type members struct {
	b *bufio.Reader
	z *gzip.Reader
}

var (
	errCutOff = errors.New("the gzip file is cut off")
	errBehind = errors.New("something follows the end of the gzip file: it was passed over")
)

// cutOff says of an end in the wrong place that it is one.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errCutOff
	}
	return err
}

// Read implements io.Reader.
func (m *members) Read(p []byte) (int, error) {
	for {
		m.z.Multistream(false)
		n, err := m.z.Read(p)
		switch {
		case n > 0 || err == nil:
			return n, nil
		case !errors.Is(err, io.EOF):
			return 0, cutOff(err)
		}
		magic, err := m.b.Peek(2)
		switch {
		case len(magic) == 0:
			return 0, err
		case len(magic) < 2 || magic[0] != 0x1f || magic[1] != 0x8b:
			return 0, errBehind
		}
		if err := m.z.Reset(m.b); err != nil {
			return 0, cutOff(err)
		}
	}
}

func (s *Source) problem(err error) { s.problems = append(s.problems, Problem{s.name, err.Error()}) }

// Problems are what could not be used so far.
func (s *Source) Problems() []Problem { return s.problems }

// Captures is how many captures were begun.
func (s *Source) Captures() int { return s.opened }

// Name is the capture that the last packet is of.
func (s *Source) Name() string { return s.name }

// Close lets go of the capture that is being read. The Source goes on with the next one.
func (s *Source) Close() {
	s.reader = nil
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}
