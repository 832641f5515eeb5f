-- args: pool, draws:list
-- recent_adapters: the adapters of jobs completed lately, each with a space and the base model that its job named, if it
-- did, one for each of `draws`, numbers drawn by the caller; empty while there is none.
local recent = K('recent_adapters:' .. pool)
local length = redis.call('LLEN', recent)
local drawn = {}
for n, draw in ipairs(draws) do
  if length > 0 then drawn[n] = redis.call('LINDEX', recent, tonumber(draw) % length) end
end
return drawn
