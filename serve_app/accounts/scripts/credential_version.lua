-- A holder signs in: `account:ID`, `account:ID:USER` for an invited user of it, or `operator:NAME`.

-- Return the name of the record that has the holder's password.
local function record_of(holder) return (string.gsub(holder, '^account:([^:]+):([^:]+)$', 'user:%1:%2')) end

-- The version that a session or link must have been given to be valid still: it changes with the password, and when the
-- account is disabled. '' where there is no such holder.
local function credential_version_of(holder)
  local first = redis.call('HMGET', K(string.match(holder, '^%a+:[^:]*')), 'created', 'closures')
  local own = redis.call('HMGET', K(record_of(holder)), 'created', 'password_changes')
  if not first[1] or not own[1] then return '' end
  return (first[2] or '0') .. '.' .. (own[2] or '0')
end
