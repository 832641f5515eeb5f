-- include jobs/webhooks
-- args: account, endpoint, message, outcome, status, error, pause_ms:number, kept:number
-- settle_delivery: what became of an attempt, by `outcome`: delivered; retry, after a pause, or never where that is
-- too late; failed; gone, after which the endpoint is told nothing more. The newest `kept` that have ended are kept for
-- the account to see. Safe to repeat. Returns the delivery's state, or '' where there is none (any more).
local delivery = delivery_of(account, endpoint, message)
local state, latest = unpack(redis.call('HMGET', delivery, 'state', 'until'))
if state ~= 'waiting' then return state or '' end
redis.call('HSET', delivery, 'status', status, 'error', error)
if outcome == 'retry' and now + pause_ms < tonumber(latest) then
  await_delivery(account, endpoint, message, now + pause_ms)
  return 'waiting'
end
state = outcome == 'delivered' and 'delivered' or 'failed'
redis.call('ZREM', K('webhook_due:' .. account), endpoint .. ':' .. message)
redis.call('HSET', delivery, 'state', state)
redis.call('HINCRBY', K('measures'), 'webhooks|' .. state, 1)

local webhook, log = K('webhook:' .. account .. ':' .. endpoint), K('webhook_log:' .. account .. ':' .. endpoint)
local is_listed = endpoint == 'jobs' or redis.call('EXISTS', webhook) == 1
if not is_listed then kept = 0 end -- the endpoint was deleted, and no list would lead to its deliveries
redis.call('ZADD', log, now, message)
redis.call('PEXPIRE', log, WEBHOOK_LIFE)
for _, old in ipairs(redis.call('ZRANGE', log, 0, -kept - 1)) do
  redis.call('ZREM', log, old)
  redis.call('DEL', delivery_of(account, endpoint, old))
end
if outcome == 'gone' and endpoint ~= 'jobs' and is_listed then redis.call('HSET', webhook, 'disabled', now) end
return state
