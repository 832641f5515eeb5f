-- include queue
-- include acceptance
-- args: job_id, kind, group, work:number, queue_share:number, num_images:number, request, rate_token
-- args: idempotency_digest, body_digest, idempotency_ms:number, adapter, traceparent, sample:flag
-- accept: every check first, then every write: after this script the job exists whole, or not at all. `adapter`: the
-- LoRA that the account must be allowed to use, and whose weights are the job's group; '' asks nothing, and `group` is
-- the job's. A call is repeated with its job id. `key_id`: the API key that asked, or ''. `plan`: its interface and
-- plan, or ''. `request_id`: of the HTTP request, for logs, or ''. `traceparent`: the span of the accept, or ''.
-- `sample`: the service's own picture for the account: no usage.
-- Returns {status, snapshot, {base model, trigger words}}; status: ok, forbidden, replay, conflict, full, account_full,
-- account_stored.

-- the same call again, because its reply was lost: the caller made the id, so it is the caller's own job
if redis.call('EXISTS', K('job:' .. job_id)) == 1 then
  return {'ok', snapshot(read_job(job_id)), lora_facts(adapter)}
end

if adapter ~= '' then
  if not may_use_adapter(account, adapter) then return {'forbidden', {}, {}} end
  group = redis.call('HGET', K('lora:' .. adapter), 'sha256')
end

local idempotency_key = K('idempotency:' .. account .. ':' .. variant .. ':' .. idempotency_digest)
if idempotency_digest ~= '' then
  local previous = redis.call('HMGET', idempotency_key, 'job', 'body')
  if previous[1] and redis.call('EXISTS', K('job:' .. previous[1])) == 1 then
    if previous[2] ~= body_digest then return {'conflict', {}, {}} end
    return {'replay', snapshot(read_job(previous[1])), lora_facts(adapter)}
  end
end

local full = no_space(1)
if full then return {full, {}, {}} end

local job = write_job({id = job_id, kind = kind, group = group, work = work, queue_share = queue_share,
  num_images = num_images, request = request, rate_token = rate_token, adapter = adapter, sample = sample,
  traceparent = traceparent,
  idempotency = idempotency_digest}) -- kept, so that deleting the job deletes its idempotency key
if idempotency_digest ~= '' then
  redis.call('HSET', idempotency_key, 'job', job_id, 'body', body_digest)
  redis.call('PEXPIRE', idempotency_key, idempotency_ms)
end
return {'ok', snapshot(job), lora_facts(adapter)}
