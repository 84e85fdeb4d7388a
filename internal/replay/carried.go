package replay

// carry notes that the live node has had the kernel take a flow: its peer, if it had to be asked, has accepted. mu is held.
func (p *Player) carry(f *Flow) {
	f.carried = true
	f.settleConnect(connectAccepted)
	if f.answered && !f.refused { // before it was known
		p.handOver(f)
	}
}

// handOver ends a flow that the kernel carries where the netstack would go on with it. mu is held.
func (p *Player) handOver(f *Flow) {
	f.Cut = CutCarried
	f.End = p.When()
	p.abandon(f)
	if f.list == &p.open {
		p.open.remove(f)
		p.over.push(f)
	}
}
