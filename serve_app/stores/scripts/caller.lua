-- Who is calling, within which plan: key → account → plan → count.
-- ARGV: key id, key digest, variant, receipt or '' (not counted), plan count n, then n × (plan name, limit, window ms);
--       the first plan is the lowest. Repeating a call with its receipt counts nothing twice.
local USED_EVERY = 60000 -- ms between two writes of "last used": polls stay reads

local function plan_named(name)
  local first = 6
  for i = first, 5 + 3 * tonumber(ARGV[5]), 3 do
    if ARGV[i] == name then return name, tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]) end
  end
  return ARGV[first], tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
end

local function unknown()
  local name, _, window = plan_named('')
  return {'unknown', '', '', name, 0, window}
end

-- {status, account id, account name, plan name, used, ms to the window's end}; status: ok, limited, unknown.
local function caller()
  local key_id, digest, variant, receipt = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local held = redis.call('HMGET', K('key:' .. key_id), 'digest', 'account', 'interfaces', 'revoked', 'used')
  if held[1] ~= digest or held[4] or not string.find(held[3], variant, 1, true) then return unknown() end
  local account = redis.call('HMGET', K('account:' .. held[2]), 'name', 'disabled', 'plan_' .. variant)
  if not account[1] or account[2] then return unknown() end

  local plan, limit, window = plan_named(account[3])
  local opened = K('window:' .. held[2] .. ':' .. variant)
  local used = redis.call('SCARD', opened)
  local left = redis.call('PTTL', opened)
  if left < 0 then left = window end
  if receipt == '' or redis.call('SISMEMBER', opened, receipt) == 1 then
    return {'ok', held[2], account[1], plan, used, left}
  end
  if used >= limit then return {'limited', held[2], account[1], plan, used, left} end
  redis.call('SADD', opened, receipt)
  if used == 0 then redis.call('PEXPIRE', opened, window) end
  if now - num(held[5], 0) >= USED_EVERY then redis.call('HSET', K('key:' .. key_id), 'used', now) end
  return {'ok', held[2], account[1], plan, used + 1, left}
end
