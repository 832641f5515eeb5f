-- include owners
-- args: pool, weights, worker
-- add_owner: a worker holds the weights of a LoRA before it has claimed a job of it.
add_owner(pool, weights, worker)
