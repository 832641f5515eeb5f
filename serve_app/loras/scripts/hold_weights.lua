-- include lora_weights
-- args: uri, token, life_ms:number
-- hold_weights: keep stored weights while a registration stores and records them, for `life_ms` at most; then they are
-- removed if no LoRA has them. Returns 1, or 0 while they are being removed: ask again.
if num(redis.call('ZSCORE', K('loras_removing'), uri), 0) > now then return 0 end
local in_use = K('weights_in_use:' .. digest_of(uri))
redis.call('ZADD', in_use, now + life_ms, token)
redis.call('PEXPIRE', in_use, life_ms)
redis.call('ZADD', K('loras_unused'), now + life_ms, uri)
return 1
