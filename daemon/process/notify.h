// Reports the daemon's state to the service manager by the protocol of sd_notify(3).
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd::daemon {

// Sends assignments ("READY=1\nSTATUS=...", one a line) to the datagram socket that $NOTIFY_SOCKET
// names: a path, or "@name" in the abstract namespace. Without the variable nothing is sent.
Status Notify(std::string_view assignments);
// Sends them to the named socket instead.
Status NotifyAt(const std::string& socket, std::string_view assignments);

// Returns how often the service manager wants WATCHDOG=1, halved so that none comes late: by
// $WATCHDOG_USEC, where $WATCHDOG_PID is this process or absent. Zero: it does not watch.
std::chrono::microseconds WatchdogInterval();

}  // namespace prefixd::daemon
