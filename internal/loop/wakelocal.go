package loop

// WakeLocal is Wake for callers on the task's own loop: the task is queued at once, so that a parent which wakes a child in
// its turn finds it in RunChildren of the same turn.
func (r *Ref) WakeLocal() { r.wakeLocal() }
