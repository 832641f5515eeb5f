-- args: account, variant, idempotency_digest, given_digest, body_digest
-- The answer to a call that may not use a LoRA, or whose idempotency key was used before. The key must come with the
-- same `given_digest`, or `body_digest` (if known) where a version up to aec29b3e (27 November 2026) accepted the job.
local idempotency_key = K('idempotency:' .. account .. ':' .. variant .. ':' .. idempotency_digest)

local loras_read = {}

-- Return what the record of a LoRA says of it, read once.
local function lora_of(id)
  if not loras_read[id] then
    local fields = {'owner', 'open', 'base_model', 'trigger_words', 'sha256', 'passes', 'added_cost', 'guidance_start',
      'guidance_end'}
    local record = redis.call('HMGET', K('lora:' .. id), unpack(fields))
    for i, name in ipairs(fields) do record[name] = record[i] end
    loras_read[id] = record
  end
  return loras_read[id]
end

-- Return what the answer says of a job's LoRAs: their base model, unless it names its `base`, and the trigger words of
-- each as JSON.
local function lora_facts(loras, base)
  local facts = {base or ''}
  for _, each in ipairs(loras) do
    local lora = lora_of(each[1])
    facts[1] = base or lora.base_model or ''
    facts[#facts + 1] = lora.trigger_words or '[]'
  end
  return facts
end

-- Return `forbidden` for LoRAs that the account may not use, the answer to a repeated idempotency key, or nil for a new
-- call.
local function forbidden_or_repeat(loras, base)
  for _, lora in ipairs(loras) do
    if not may_use_adapter(account, lora[1], lora_of(lora[1])) then return {'forbidden', {}, {}} end
  end
  if idempotency_digest == '' then return nil end
  local previous = redis.call('HMGET', idempotency_key, 'job', 'given', 'body')
  if not previous[1] or redis.call('EXISTS', K('job:' .. previous[1])) == 0 then return nil end
  if not previous[2] and body_digest == '' then return nil end
  local is_repeat = previous[2] == given_digest or not previous[2] and previous[3] == body_digest
  if not is_repeat then return {'conflict', {}, {}} end
  return {'replay', snapshot(read_record(previous[1])), lora_facts(loras, base)}
end
