-- include snapshot
-- args: account, variant, idempotency_digest, given_digest, body_digest
-- The answer to a call that may not use a LoRA, or whose idempotency key was used before. The key must come with the
-- same `given_digest`, or `body_digest` (if known) where a version up to aec29b3e (27 November 2026) accepted the job.
local idempotency_key = K('idempotency:' .. account .. ':' .. variant .. ':' .. idempotency_digest)

-- Return what the answer says of a job's LoRAs: their base model, unless it names its `base`, and the trigger words of
-- each as JSON.
local function lora_facts(loras, base)
  local facts = {base or ''}
  for _, lora in ipairs(loras) do
    local found = redis.call('HMGET', K('lora:' .. lora[1]), 'base_model', 'trigger_words')
    facts[1] = base or found[1] or ''
    facts[#facts + 1] = found[2] or '[]'
  end
  return facts
end

-- Return `forbidden` for LoRAs that the account may not use, the answer to a repeated idempotency key, or nil for a new
-- call.
local function forbidden_or_repeat(loras, base)
  for _, lora in ipairs(loras) do
    if not may_use_adapter(account, lora[1]) then return {'forbidden', {}, {}} end
  end
  if idempotency_digest == '' then return nil end
  local previous = redis.call('HMGET', idempotency_key, 'job', 'given', 'body')
  if not previous[1] or redis.call('EXISTS', K('job:' .. previous[1])) == 0 then return nil end
  if not previous[2] and body_digest == '' then return nil end
  local is_repeat = previous[2] == given_digest or not previous[2] and previous[3] == body_digest
  if not is_repeat then return {'conflict', {}, {}} end
  return {'replay', snapshot(read_record(previous[1])), lora_facts(loras, base)}
end
