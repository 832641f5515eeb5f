-- args: pool, draws:list
-- recent_adapters: the adapters of jobs completed lately, each with a space and the base model that its job named, if
-- it did, one for each of `draws`, numbers drawn by the caller, but for LoRAs that are gone; empty while there is none.
local recent = K('recent_adapters:' .. pool)
local length = redis.call('LLEN', recent)
local drawn = {}
for _, draw in ipairs(length > 0 and draws or {}) do
  local adapter = redis.call('LINDEX', recent, tonumber(draw) % length)
  if redis.call('EXISTS', K('lora:' .. string.match(adapter, '^%S+'))) == 1 then drawn[#drawn + 1] = adapter end
end
return drawn
