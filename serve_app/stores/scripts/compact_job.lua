-- args: job_id, images, adapter_digest, key_digest, parts:list
-- compact_job: replace the record of a completed job by its compact form, `parts`, for readers, and what scripts need: digests of the
-- adapter and the key that lists ask for. Only while its images (JSON) are those that were packed. Running it twice changes nothing.
-- Returns 1 when the job is off the list of those to compact, 0 when its record has changed meanwhile.
local name, due = K('job:' .. job_id), K('uncompacted')
local job = redis.call('HMGET', name, 'state', 'account', 'variant', 'attempt', 'images', 'idempotency', '0')
if job[1] ~= 'completed' or job[7] then
  redis.call('ZREM', due, job_id)
  return 1
end
if job[5] ~= images then return 0 end

local life = redis.call('PTTL', name)
local kept = {'state', 'completed', 'account', job[2], 'variant', job[3], 'attempt', job[4] or '0'}
local function keep(field, value)
  kept[#kept + 1] = field
  kept[#kept + 1] = value
end
if adapter_digest ~= '' then keep('a', adapter_digest) end
if key_digest ~= '' then keep('k', key_digest) end
if job[6] and redis.call('EXISTS', K('idempotency:' .. job[2] .. ':' .. job[3] .. ':' .. job[6])) == 1 then
  keep('idempotency', job[6])
end
for number, part in ipairs(parts) do keep(number - 1, part) end
redis.call('DEL', name)
redis.call('HSET', name, unpack(kept))
if life > 0 then redis.call('PEXPIRE', name, life) end
redis.call('ZREM', due, job_id)
return 1
