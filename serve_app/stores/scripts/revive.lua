-- include queue
-- revive: the operator sends a dead letter back to work, with all its attempts. ARGV: job id. Returns 1, or 0 when it is not dead.
local id = ARGV[1]
local job = read_job(id)
if not job or job.state ~= 'failed' then return 0 end
redis.call('ZREM', K('dead'), id)
redis.call('PERSIST', K('job:' .. id))
redis.call('HDEL', K('job:' .. id), 'code', 'message', 'finished', 'tries', 'losses', 'skips', 'skipped_at', 'receipt')
redis.call('HSET', K('job:' .. id), 'state', 'queued', 'since', now)
redis.call('HINCRBY', K('live'), job.account, 1)
redis.call('HINCRBY', K('load:' .. job.kind), 'work', job.work)
redis.call('HINCRBY', K('count'), 'failed', -1)
put_in_queue(read_job(id))
return 1
