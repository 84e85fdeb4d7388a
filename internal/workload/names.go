package workload

// ServicesNamed are all services with a hostname, in lower case, whoever may see them: canonical ones first, then by key. The list
// belongs to the snapshot.
func (s *Snapshot) ServicesNamed(hostname string) []*Service {
	if s == nil {
		return nil
	}
	return s.names[hostname]
}
