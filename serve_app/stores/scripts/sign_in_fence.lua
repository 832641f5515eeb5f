-- What a session or link must have been given to be good still: it changes with the password, and when the account is disabled.
-- `record` is an account's or operator's. '' where there is none.
local function sign_in_fence(record)
  local fields = redis.call('HMGET', K(record), 'created', 'closures', 'password_changes')
  if not fields[1] then return '' end
  return (fields[2] or '0') .. '.' .. (fields[3] or '0')
end
