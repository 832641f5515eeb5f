# Hardens a configuration of HAProxy that Serve has generated. Its variables are: folder (of the files to insert), host (to
# listen on, if not Serve's), trusted (networks of trusted proxies), connections (of one address at a time), most
# (connections in all) and servers (a file with the last configuration's, by backend, which is written anew). It ends with
# code 3 when the configuration does not look as expected: a proxy without its protection must not start.

function insert(file,    line) {
    while ((getline line < (folder "/" file)) > 0) {
        gsub(/@TRUSTED_PROXIES@/, trusted, line)
        gsub(/@SECRET@/, ENVIRON["ATELIER_PROXY_SECRET"], line)
        gsub(/@CONNECTIONS_PER_ADDRESS@/, connections, line)
        print line
    }
    close(folder "/" file)
}

# While Serve builds an application anew, and after a build that failed, it names no replica of it, though all of them
# run: those of the last configuration stay. HAProxy's own checks say which of them live.
function bring_back() {
    if (section ~ /^backend/ && !(section in now) && section in last) {
        printf "%s", last[section]
        now[section] = last[section]
    }
}

BEGIN {
    while ((getline line < servers) > 0)
        if (line ~ /^backend/) section = line; else last[section] = last[section] line "\n"
    close(servers)
    section = ""
}

NR == 1 { print "# hardened by atelier" }

/^(global|defaults|frontend|backend|listen)/ { bring_back(); section = $1 " " $2 }

section ~ /^global/ {
    if ($1 == "log") next                                  # the access log: it would hold signed image addresses
    if ($1 == "stats" && $2 == "socket") sockets += sub(/ mode 666 /, " mode 600 ")
    # HAProxy is replaced whenever an ingress replica comes or goes: what it has begun may take as long as in backend.cfg.
    if ($1 == "hard-stop-after" && $2 + 0 < 600) sub($2, "600s")
    if ($1 == "maxconn") { if (most && $2 > most) sub($2, most); print; print "    tune.http.maxhdr 400"; next }
}

section ~ /^defaults/ {
    if ($1 == "errorfile" || $0 ~ /option httplog/) next
    # With it, a caller whose body came after its headers hangs up unnoticed (HAProxy 2.8.25).
    if ($0 ~ /option splice-request/) next
    # A request whose replica dies is sent to another, also after the connection was made, where frontend.cfg allows it.
    if ($1 == "retry-on") retries += sub(/retry-on .*/, "retry-on conn-failure empty-response")
    if ($1 == "mode") { print; insert("defaults.cfg"); defaults++; next }
}

# Statistics over HTTP would be open to every user of the machine; Serve reads its own from the socket.
section == "frontend prometheus" || section == "listen stats" { statistics += $1 == "bind"; next }

section == "frontend http_frontend" && $1 == "bind" {
    if (host) sub(/bind [^ ]*:/, "bind " host ":")
    print $0 " proto h1"
    insert("frontend.cfg")
    frontends++
    next
}

# On a connection that others used, HAProxy answers a replica's death with silence, as HTTP allows on a caller's later
# requests: with `safe` a caller's first request never goes there.
$1 == "http-reuse" { sub(/http-reuse .*/, "http-reuse safe") }

section ~ /^backend http-/ && $1 == "backend" { print; insert("backend.cfg"); backends++; next }

# A replica that drains fails Serve's checks from its first moment, and serves on. Its successor may be named by a reload
# that comes only then: until that one the draining replica stays in use.
section ~ /^backend http-/ && $1 == "http-check" && $2 == "expect" {
    checks += sub(/expect status 200/, "expect rstring ^(success|DRAINING)")
}

# A caller gets 503 at once while no ingress serves: Serve's proxy of last resort would hold the request until one does.
section ~ /^backend/ && $1 == "server" {
    if ($NF == "backup") next
    now[section] = now[section] $0 "\n"
}

# Serve's own error texts are replaced by those of defaults.cfg.
section == "backend default_backend" { sub(/return status 404/, "return status 503") }
/http-request return status [45]/ { sub(/content-type text\/plain (lf-)?string "([^"\\]|\\.)*"/, "default-errorfiles") }

{ print }

END {
    bring_back()
    insert("answers.cfg")
    if (sockets != 1 || defaults != 1 || statistics != 2 || frontends != 1 || retries != 1 || checks != backends) {
        print "atelier: this configuration of Serve is not known; HAProxy is not started without its protection" \
            > "/dev/stderr"
        exit 3
    }
    printf "" > servers
    for (section in now) printf "%s\n%s", section, now[section] > servers
}
