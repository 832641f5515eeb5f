-- include permission
-- include lora
-- args: lora, order, record, asks:flag, max_loras:number, max_bytes:number, owned, owned_bytes:number, same
-- args: idempotency_digest, given_digest, body_digest, idempotency_ms:number
-- register_lora: add a LoRA whose id the caller has made; `record` is JSON. Repeating the call changes nothing. With
-- `asks` nothing is written: the answer says whether it would be added. With `max_loras` the owner has a quota, and may
-- have the same weights for a base model once. The caller has read the owner's LoRAs: `owned` is SHA-1 of their ids,
-- which take `owned_bytes`; `same` is that with these weights, or ''. Returns {status, id}: added, taken (the id is in
-- use), replayed (an earlier call had this key and body), conflict (it had another body), same (the owner has these
-- weights), too_many, too_large, changed (the owner has other LoRAs by now: read them again).
local held = redis.call('HGET', K('lora:' .. lora), 'source')
if held then return {held == 'registered' and 'added' or 'taken', lora} end
if redis.call('ZSCORE', K('loras_withdrawn'), 'granted:' .. lora) then return {'taken', lora} end -- grants are left

local new = cjson.decode(record)
local idempotency_key = K('idempotency:' .. new.owner .. ':loras:' .. idempotency_digest)
if idempotency_digest ~= '' then
  local previous = redis.call('HMGET', idempotency_key, 'lora', 'given', 'body')
  if previous[1] and redis.call('EXISTS', K('lora:' .. previous[1])) == 1 then
    local is_repeat = previous[2] == given_digest or not previous[2] and previous[3] == body_digest
    return {is_repeat and 'replayed' or 'conflict', previous[1]}
  end
end

if max_loras then
  local ids = redis.call('ZRANGE', K('loras_owned:' .. new.owner), 0, -1)
  if redis.sha1hex(table.concat(ids, ' ')) ~= owned then return {'changed', ''} end
  if same ~= '' then return {'same', same} end
  if #ids >= max_loras then return {'too_many', ''} end
  if owned_bytes + num(new.bytes, 0) > max_bytes then return {'too_large', ''} end
end
if asks then return {'added', lora} end

write_lora(lora, order, new)
if idempotency_digest ~= '' then
  redis.call('HSET', idempotency_key, 'lora', lora, 'given', given_digest, 'body', body_digest)
  redis.call('PEXPIRE', idempotency_key, idempotency_ms)
end
return {'added', lora}
