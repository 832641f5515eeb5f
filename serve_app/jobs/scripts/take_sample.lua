-- include loras/pools
-- args: worker_life_ms:number, every_ms:number, life_ms:number
-- take_sample: the LoRA whose sample picture is to be drawn now, or '': only while a worker of its pool lives and nothing
-- waits there, and one in `every_ms`. A LoRA that waited longer than `life_ms` goes without. Run twice, one goes without,
-- too.
local NEXT = 16 -- LoRAs that are looked at: one whose pool is busy or has no worker must not keep back all others

local function is_idle(pool)
  return redis.call('ZCARD', K('age:' .. pool)) == 0
    and redis.call('ZCOUNT', K('workers:' .. pool), now - worker_life_ms, '+inf') > 0
end

redis.call('ZREMRANGEBYSCORE', K('loras_sampling'), '-inf', now - life_ms)
for _, lora in ipairs(redis.call('ZRANGE', K('loras_sampling'), 0, NEXT - 1)) do
  if is_idle(wanted_pool({adapters = {lora}, pool = 'generation'})) then
    if not redis.call('SET', K('loras_sampled'), now, 'NX', 'PX', every_ms) then return '' end
    redis.call('ZREM', K('loras_sampling'), lora)
    return lora
  end
end
return ''
