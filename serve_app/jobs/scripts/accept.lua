-- include queue
-- include acceptance
-- args: new, idempotency_digest, body_digest, idempotency_ms:number
-- accept: every check first, then every write: after this script the job exists whole, or not at all. `new`: JSON, as
-- `write_job` takes a job. Its account must be allowed to use its `loras`, whose weights are the job's group; without
-- one `group` is. A call is repeated with its job id. `key_id`: the API key that asked, or ''. `plan`: its interface and
-- plan, or ''. `request_id`: of the HTTP request, for logs, or ''.
-- Returns {status, snapshot, {base model, trigger words of each LoRA}}; status: ok, forbidden, replay, conflict, full,
-- account_full, account_stored.
local new = cjson.decode(new)

-- the same call again, because its reply was lost: the caller made the id, so it is the caller's own job
if redis.call('EXISTS', K('job:' .. new.id)) == 1 then
  return {'ok', snapshot(read_job(new.id)), lora_facts(new.loras)}
end
if not may_use_all(new.loras) then return {'forbidden', {}, {}} end

local idempotency_key = K('idempotency:' .. account .. ':' .. variant .. ':' .. idempotency_digest)
if idempotency_digest ~= '' then
  local previous = redis.call('HMGET', idempotency_key, 'job', 'body')
  if previous[1] and redis.call('EXISTS', K('job:' .. previous[1])) == 1 then
    if previous[2] ~= body_digest then return {'conflict', {}, {}} end
    return {'replay', snapshot(read_job(previous[1])), lora_facts(new.loras)}
  end
end

local full = no_space(1)
if full then return {full, {}, {}} end

new.idempotency = idempotency_digest -- kept, so that deleting the job deletes its idempotency key
local job = write_job(new)
if idempotency_digest ~= '' then
  redis.call('HSET', idempotency_key, 'job', new.id, 'body', body_digest)
  redis.call('PEXPIRE', idempotency_key, idempotency_ms)
end
return {'ok', snapshot(job), lora_facts(new.loras)}
