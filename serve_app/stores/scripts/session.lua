-- session: the account of a live session, whose idle time starts again but never passes its absolute end.
-- ARGV: token digest, idle ms. Returns the account id or ''.
local name = K('session:' .. ARGV[1])
local held = redis.call('HMGET', name, 'account', 'ends')
if not held[1] then return '' end
local left = num(held[2], 0) - now
if left <= 0 then
  redis.call('DEL', name)
  return ''
end
redis.call('PEXPIRE', name, math.min(left, tonumber(ARGV[2])))
return held[1]
