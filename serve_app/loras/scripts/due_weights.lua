-- include lora_weights
-- args: life_ms:number, limit:number
-- due_weights: return the URIs of at most `limit` weights that no LoRA has and nobody holds. For `life_ms` they are the
-- caller's to remove; then they are due again.
redis.call('ZREMRANGEBYSCORE', K('loras_removing'), '-inf', now)
local due = {}
for _, uri in ipairs(redis.call('ZRANGEBYSCORE', K('loras_unused'), '-inf', now, 'LIMIT', 0, limit)) do
  local held = held_until(uri)
  if is_stored(uri) then
    redis.call('ZREM', K('loras_unused'), uri)
  elseif held then
    redis.call('ZADD', K('loras_unused'), held, uri)
  else
    redis.call('ZADD', K('loras_unused'), now + life_ms, uri)
    redis.call('ZADD', K('loras_removing'), now + life_ms, uri)
    due[#due + 1] = uri
  end
end
return due
