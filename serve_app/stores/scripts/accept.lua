-- include queue
-- args: job_id, kind, variant, account, group, work:number, queue_share:number, num_images:number, request, rate_token
-- args: idempotency_digest, body_digest, max_queued:number, max_unfinished:number, idempotency_ms:number, index_ms:number
-- args: adapter, version:number, key_id, plan, request_id, traceparent, sample:flag
-- accept: every check first, then every write: after this script the job exists whole, or not at all. `adapter`: the LoRA
-- that the account must be allowed to use, and whose weights are the job's group; '' asks nothing, and `group` is the job's.
-- A call is repeated with its job id. `key_id`: the API key that asked, or ''. `plan`: its interface
-- and plan, or ''. `request_id`: of the HTTP request, for logs, or ''. `traceparent`: the span of the accept, or ''.
-- `sample`: the service's own picture for the account: no usage.
-- Returns {status, snapshot}; status: ok, forbidden, replay, conflict, full, account_full.

-- the same call again, because its reply was lost: the caller made the id, so it is the caller's own job
if redis.call('EXISTS', K('job:' .. job_id)) == 1 then return {'ok', snapshot(job_id)} end

if adapter ~= '' then
  if not may_use_adapter(account, adapter) then return {'forbidden', {}} end
  group = redis.call('HGET', K('lora:' .. adapter), 'sha256')
end

local idempotency_key = K('idempotency:' .. account .. ':' .. variant .. ':' .. idempotency_digest)
if idempotency_digest ~= '' then
  local previous = redis.call('HMGET', idempotency_key, 'job', 'body')
  if previous[1] and redis.call('EXISTS', K('job:' .. previous[1])) == 1 then
    if previous[2] ~= body_digest then return {'conflict', {}} end
    return {'replay', snapshot(previous[1])}
  end
end

local waiting = 0
for _, each in ipairs(KINDS) do waiting = waiting + redis.call('ZCARD', K('age:' .. each)) end
if waiting >= max_queued then return {'full', {}} end
if num(redis.call('HGET', K('unfinished'), account), 0) >= max_unfinished then return {'account_full', {}} end

local sequence = redis.call('INCR', K('sequence'))
redis.call('HSET', K('job:' .. job_id), 'version', version, 'state', 'queued', 'kind', kind, 'variant', variant,
  'account', account, 'group', group, 'work', work, 'queue_share', queue_share, 'num_images', num_images,
  'request', request, 'created', now, 'waiting_since', now, 'sequence', sequence)
if rate_token ~= '' then redis.call('HSET', K('job:' .. job_id), 'rate_token', rate_token) end
if adapter ~= '' then redis.call('HSET', K('job:' .. job_id), 'adapter', adapter) end
if sample then redis.call('HSET', K('job:' .. job_id), 'sample', '1') end
if plan ~= '' then redis.call('HSET', K('job:' .. job_id), 'plan', plan) end
if request_id ~= '' then redis.call('HSET', K('job:' .. job_id), 'request_id', request_id) end
if traceparent ~= '' then redis.call('HSET', K('job:' .. job_id), 'traceparent', traceparent) end
if key_id ~= '' then redis.call('HSET', K('job:' .. job_id), 'key', key_id) end
if idempotency_digest ~= '' then
  redis.call('HSET', K('job:' .. job_id), 'idempotency', idempotency_digest) -- so that the key goes with a deleted job
  redis.call('HSET', idempotency_key, 'job', job_id, 'body', body_digest)
  redis.call('PEXPIRE', idempotency_key, idempotency_ms)
end
redis.call('HINCRBY', K('unfinished'), account, 1)
redis.call('HINCRBY', K('load:' .. kind), 'work', work)
redis.call('HINCRBY', K('load:' .. kind), 'accepted_work', work)
redis.call('HINCRBY', K('count'), 'accepted', 1)
enqueue(read_job(job_id))

local account_jobs = K('jobs:' .. account)
redis.call('ZADD', account_jobs, now, job_id)
redis.call('ZREMRANGEBYSCORE', account_jobs, '-inf', now - index_ms)
redis.call('PEXPIRE', account_jobs, index_ms)
redis.call('ZADD', K('recent'), now, job_id)
redis.call('ZREMRANGEBYRANK', K('recent'), 0, -RECENT - 1)
return {'ok', snapshot(job_id)}
