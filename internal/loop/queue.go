package loop

// A queue is a first-in, first-out list of Refs, linked through them: no allocation, and removal from the middle.
// A Ref is in at most one queue (Ref.in).
type queue struct {
	head, tail *Ref
	n          int
}

func (q *queue) push(r *Ref) {
	r.in, r.prev, r.next = q, q.tail, nil
	if q.tail == nil {
		q.head = r
	} else {
		q.tail.next = r
	}
	q.tail = r
	q.n++
}

func (q *queue) pop() *Ref {
	r := q.head
	q.remove(r)
	return r
}

func (q *queue) remove(r *Ref) {
	if r.prev == nil {
		q.head = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		q.tail = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.in, r.prev, r.next = nil, nil, nil
	q.n--
}
