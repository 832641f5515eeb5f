-- include owners
-- args: kind, group, worker
-- add_owner: a worker holds a group's adapter before it has claimed a job of it.
add_owner(kind, group, worker)
