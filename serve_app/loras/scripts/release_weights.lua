-- include lora_weights
-- args: uri, token
-- release_weights: end a hold; weights that no LoRA has and nobody holds are due at once.
redis.call('ZREM', K('weights_in_use:' .. digest_of(uri)), token)
if held_until(uri) then return end
if is_stored(uri) then
  redis.call('ZREM', K('loras_unused'), uri)
else
  redis.call('ZADD', K('loras_unused'), now, uri)
end
