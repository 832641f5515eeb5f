-- args: log, holder, entry, actor, action, subject, address, max_rows:number, life_ms:number
-- append_audit: appends one row to an account's log, whose rows go by the log's length and age alone. `entry` names
-- the call: a repeated one appends nothing. `holder` may be ''; else the row is appended only if there is such a
-- record. Returns 1, or 0 when nothing was appended.
local REPEATS = 32 -- rows that may come between a call and its repeat

if holder ~= '' and redis.call('EXISTS', K(holder)) == 0 then return 0 end
local name = K('audit:' .. log)
for _, row in ipairs(redis.call('XREVRANGE', name, '+', '-', 'COUNT', REPEATS)) do
  if row[2][2] == entry then return 0 end
end
write_also_when_full()
redis.call('XADD', name, 'MAXLEN', max_rows, '*', 'entry', entry, 'actor', actor, 'action', action, 'subject', subject,
  'address', address)
redis.call('XTRIM', name, 'MINID', string.format('%.0f', math.max(0, now - life_ms)))
redis.call('PEXPIRE', name, life_ms)
redis.call('ZADD', K('audit_logs'), now, log)
redis.call('ZREMRANGEBYSCORE', K('audit_logs'), '-inf', now - life_ms)
return 1
