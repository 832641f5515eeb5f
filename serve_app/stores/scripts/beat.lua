-- include queue
-- beat: keep the lease, store the progress, learn of a cancel. ARGV: job id, attempt, lease ms, progress
-- Returns ok, cancel or fenced. The first write frees memory, so that beats go on when the server is full.
local id, attempt, lease, progress = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local job = read_job(id)
if not is_held(job, attempt) then return fenced() end
redis.call('ZREM', K('lease:' .. job.kind), id)
redis.call('ZADD', K('lease:' .. job.kind), now + lease, id)
if redis.call('GET', K('alone:' .. job.kind)) == job.worker then redis.call('PEXPIRE', K('alone:' .. job.kind), lease) end
redis.call('ZADD', K('workers:' .. job.kind), now, job.worker)
local shown = math.max(num(redis.call('HGET', K('job:' .. id), 'progress'), 0), math.min(progress, 99))
redis.call('HSET', K('job:' .. id), 'progress', shown)
return job.cancel and 'cancel' or 'ok'
