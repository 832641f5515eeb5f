-- include queue
-- args: job_id, index_ms:number
-- requeue_dead: the operator queues a failed job again, with all its attempts. Returns 1, or 0 when it has not failed.
local job = read_job(job_id)
if not job or job.state ~= 'failed' then return 0 end
redis.call('ZREM', K('dead'), job_id)
redis.call('PERSIST', K('job:' .. job_id))
redis.call('HDEL', K('job:' .. job_id), 'code', 'message', 'finished')
job.pool = wanted_pool(job)
know_pool(job.pool) -- the reaper may have forgotten it since
redis.call('HSET', K('job:' .. job_id), 'state', 'queued', 'waiting_since', now, 'kind', job.pool)
redis.call('HINCRBY', K('unfinished'), job.account, 1)
redis.call('ZADD', K('jobs:' .. job.account), now, job_id) -- its record outlives others of its age
redis.call('PEXPIRE', K('jobs:' .. job.account), index_ms)
redis.call('HINCRBY', K('load:' .. job.pool), 'work', job.work)
redis.call('HINCRBY', K('count'), 'failed', -1)
local queued = read_job(job_id)
enqueue(queued)
begin_uses(queued)
look_at_waiting(queued)
return 1
