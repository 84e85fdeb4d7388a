package tun

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
)

// A storage has what is known of the connections of one netns that no mark tells, see bpf/tcsteer.c. The filter on the device holds it
// when the process has died.
type storage struct {
	steered *ebpf.Map // by socket
	older   *ebpf.Map // by flow
}

// Names of its maps.
const (
	steeredMap = "steered"
	olderMap   = "older"
)

func (t *storage) close() error { return errors.Join(t.steered.Close(), t.older.Close()) }

// load loads programs of bpf/tcsteer.c for the netns, with the maps that an earlier start has left there, or else new ones. The programs are the
// caller's to close.
func (t *storage) load(s *setup, flows *ebpf.Map, names ...string) (programs map[string]*ebpf.Program, err error) {
	spec, err := withMarks(s.cfg.Marks, loadTcsteer)
	if err != nil {
		return nil, err
	}
	v := spec.Variables
	if err := errors.Join(v["netns_cookie"].Set(s.cookie), v["device"].Set(uint32(s.link.Attrs().Index))); err != nil {
		return nil, err
	}
	for name := range spec.Programs {
		if !slices.Contains(names, name) {
			delete(spec.Programs, name)
		}
	}
	left, err := s.leftStorage()
	if err != nil {
		return nil, err
	}
	maps := map[string]*ebpf.Map{"flows": flows}
	if left.steered != nil && left.older != nil {
		maps[steeredMap], maps[olderMap] = left.steered, left.older
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: maps})
	if err = errors.Join(err, left.close()); err != nil {
		return nil, err
	}
	defer coll.Close()
	t.steered, t.older = coll.DetachMap(steeredMap), coll.DetachMap(olderMap)
	programs = make(map[string]*ebpf.Program)
	for _, name := range names {
		programs[name] = coll.DetachProgram(name)
	}
	return programs, nil
}

// leftStorage returns that of the filter on the device, of an earlier start or of this process: its maps are nil where there is none.
func (s *setup) leftStorage() (t storage, err error) {
	if s.link == nil {
		return t, nil
	}
	ours, err := s.filtersOf(egressFilter, s.link.Attrs().Index)
	if err != nil || len(ours) == 0 {
		return t, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("storage of filter %s: %w", egressFilter.name, err), t.close())
			t = storage{}
		}
	}()
	prog, err := ebpf.NewProgramFromID(ebpf.ProgramID(ours[0].Id))
	if err != nil {
		return t, err
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return t, err
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return t, err
		}
		about, err := m.Info()
		switch {
		case err == nil && about.Name == steeredMap:
			t.steered = m
		case err == nil && about.Name == olderMap:
			t.older = m
		default:
			if err := errors.Join(err, m.Close()); err != nil {
				return t, err
			}
		}
	}
	return t, nil
}

// keepRunning has the connections that the netns of this thread has go on in the kernel, by their addresses and ports: there is no program that
// could mark their sockets. The first segment that the pod sends on one puts it into the socket, its SYN takes it out.
func (t *storage) keepRunning(cookie uint64) error {
	var list []flowKey
	err := eachSocket(func(d *diagSocket) {
		switch d.info.State {
		case tcpSynSent, tcpSynRecv, tcpTimeWait, tcpClose: // one that is only being opened has its next SYN decided about
		default:
			if !d.ofThePodItself() {
				list = append(list, keyOf(cookie, d.local, d.remote))
			}
		}
	})
	for i := range list {
		if err == nil {
			err = t.older.Put(&list[i], uint32(1))
		}
	}
	if err != nil {
		return fmt.Errorf("connections that are older: %w", err)
	}
	return nil
}

// ways returns where connections of the netns of this thread lead that t knows: to the network or to ztun's listener.
func (t *storage) ways() (map[socketAddrs]Way, error) {
	found := make(map[socketAddrs]Way)
	if t.older != nil {
		var key flowKey
		var value uint32
		all := t.older.Iterate()
		for all.Next(&key, &value) {
			local, remote := key.addrs()
			found[socketAddrs{local, remote}] = ToNetwork
		}
		if err := all.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
			return nil, fmt.Errorf("connections that are older: %w", err)
		}
	}
	if t.steered == nil {
		return found, nil
	}
	err := eachSocketStoring(t.steered, func(d *diagSocket) {
		if w := Way(d.stored); w != 0 {
			found[socketAddrs{d.local, d.remote}] = w
		}
	})
	if err != nil {
		return nil, fmt.Errorf("storages of sockets: %w", err)
	}
	return found, nil
}

// carriedByKernel returns what tells the connections that the kernel carries, of those of the netns of this thread: their mark, or t.
func (t *storage) carriedByKernel(m Marks) (func(*diagSocket) bool, error) {
	ways, err := t.ways()
	if err != nil {
		return nil, err
	}
	return func(d *diagSocket) bool {
		if d.info.State == tcpTimeWait || d.ofThePodItself() {
			return false
		}
		w, known := ways[socketAddrs{d.local, d.remote}]
		if known {
			return w == ToNetwork
		}
		return d.info.Mark&m.OwnMask == m.Own
	}, nil
}

// ofThePodItself reports whether both ends are the pod's.
func (d *diagSocket) ofThePodItself() bool {
	return d.remote.Addr().IsLoopback() || d.remote.Addr() == d.local.Addr()
}
