-- include jobs/webhooks
-- args: account, endpoint
-- delete_webhook: removes an endpoint with the list of its deliveries; those that wait end at their next attempt. Safe to
-- repeat.
redis.call('ZREM', K('webhooks:' .. account), endpoint)
local log = K('webhook_log:' .. account .. ':' .. endpoint)
local names = {K('webhook:' .. account .. ':' .. endpoint), log}
for _, told in ipairs(redis.call('ZRANGE', log, 0, -1)) do names[#names + 1] = delivery_of(account, endpoint, told) end
redis.call('DEL', unpack(names))
return 1
