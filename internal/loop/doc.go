// Package loop runs the data path: event loops decide which flow moves bytes next, and on which thread.
//
// A [Task] is what one thread at a time works on: a tunnel with all its streams, or a plain relay between two
// connections. [Group.Add] gives a task to the least loaded loop of a [Group]; from then on only that loop touches it, so
// that a task needs no locks. A loop is one OS thread with one epoll, an inbox for what others send it ([Ref.Wake],
// [Ref.Post]), a timer heap, and two queues: tasks that were just woken and tasks that have more to move. Woken tasks go
// first, then one busy task, then epoll is looked at again: a flow that was idle waits for at most one slice of one other.
//
// What may be slow stays outside: dialling, handshakes and policy waits are goroutines started by [Group.Go], which wait
// only by [Await]. A goroutine exists per connection being set up, none per established one.
//
// A [Manual] drives the same tasks without threads and on a clock that is advanced by hand, one thing at a time, for tests,
// fuzzing and replay.
//
// The package knows nothing of what the bytes mean.
package loop
