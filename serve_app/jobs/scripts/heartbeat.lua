-- include queue
-- args: job_id, attempt:number, lease_ms:number, progress:number
-- heartbeat: extend the lease, store the progress, learn of a cancel. The first write frees memory, so that heartbeats
-- go on when the server is full. Returns ok, cancel, forbidden (its account may no longer use its adapter) or fenced.
local job = read_job(job_id)
if not holds_lease(job, attempt) then return fenced() end
redis.call('ZREM', K('lease:' .. job.pool), job_id)
redis.call('ZADD', K('lease:' .. job.pool), now + lease_ms, job_id)
local quarantine_worker = K('quarantine_worker:' .. job.pool)
if redis.call('GET', quarantine_worker) == job.worker then redis.call('PEXPIRE', quarantine_worker, lease_ms) end
redis.call('ZADD', K('workers:' .. job.pool), now, job.worker)
local shown = math.max(num(redis.call('HGET', K('job:' .. job_id), 'progress'), 0), math.min(progress, 99))
redis.call('HSET', K('job:' .. job_id), 'progress', shown)
if job.cancel then return 'cancel' end
return keeps_adapters(job) and 'ok' or 'forbidden'
