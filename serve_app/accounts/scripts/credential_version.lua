-- What a session or link must have been given to be good still: it changes with the password, and when the account is disabled.
-- `record` is `account:ID`, `account:ID:USER` for one of its invited users, or `operator:NAME`. '' where there is none.
local function credential_version_of(record)
  local account, user = string.match(record, '^account:([^:]+):([^:]+)$')
  local fields = redis.call('HMGET', K(user and 'account:' .. account or record), 'created', 'closures', 'password_changes')
  if not fields[1] then return '' end
  local changes = fields[3]
  if user then
    local own = redis.call('HMGET', K('user:' .. account .. ':' .. user), 'created', 'password_changes')
    if not own[1] then return '' end
    changes = own[2]
  end
  return (fields[2] or '0') .. '.' .. (changes or '0')
end

-- The account's own user, the first, is ''.
local function user_credential_version(account, user)
  return credential_version_of('account:' .. account .. (user ~= '' and ':' .. user or ''))
end
