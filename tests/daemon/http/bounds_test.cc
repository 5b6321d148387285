// Tests that nobody can make HTTP cost the daemon more than it may.
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "daemon/http/metrics.h"
#include "tests/daemon/http/exposition.h"
#include "tests/daemon/http/http_fixture.h"

namespace prefixd::testing {
namespace {

TEST_F(HttpTest, OnlyGetAndHeadAreAnswered) {
  Start();
  for (const std::string method :
       {"POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "WHAT"}) {
    const HttpReply reply = Get(port_, "/metrics", "", method);
    EXPECT_EQ(reply.status, 405) << method;
    EXPECT_EQ(reply.fields.at("allow"), "GET, HEAD");
    EXPECT_FALSE(reply.fields.contains("access-control-allow-origin"));
  }
  const HttpReply got = Get(port_, "/healthz"), head = Get(port_, "/healthz", "", "HEAD");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.body, "");
  EXPECT_EQ(head.fields.at("content-length"), got.fields.at("content-length"));
  EXPECT_EQ(got.fields.at("content-length"), std::to_string(got.body.size()));
  EXPECT_EQ(Get(port_, "/nothing").status, 404);
  EXPECT_EQ(Get(port_, "/../../etc/passwd").status, 404);
}

// A page of another site can make a browser ask here only under that site's name.
TEST_F(HttpTest, OtherNamesThanThisMachinesAreRefusedOnLoopback) {
  Start();
  const auto with_host = [&](const std::string& host) {
    return Exchange(port_, "GET /status.json HTTP/1.1\r\nHost: " + host + "\r\n\r\n").status;
  };
  for (const std::string host : {"localhost", "localhost:9460", "127.0.0.1", "127.0.0.1:80",
                                 "[::1]", "[::1]:9460", "127.1.2.3"}) {
    EXPECT_EQ(with_host(host), 200) << host;
  }
  for (const std::string host : {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
                                 "127.evil.example.x", "192.168.0.1", "[2001:db8::1]", "["}) {
    EXPECT_EQ(with_host(host), 421) << host;
  }
  EXPECT_EQ(Get(port_, "/status.json", "Origin: http://evil.example\r\n")
                .fields.count("access-control-allow-origin"),
            0u);
}

TEST_F(HttpTest, WhatIsNoRequestIsRefused) {
  Start();
  const auto status = [&](const std::string& bytes) { return Exchange(port_, bytes).status; };
  EXPECT_EQ(status("garbage\r\n\r\n"), 400);
  EXPECT_EQ(status("GET / HTTP/1.1\r\n\r\n"), 400);  // no Host
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"), 400);
  EXPECT_EQ(status("GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n"), 400);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"), 413);
  EXPECT_EQ(
      status("GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
      413);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: "
                   "chunked\r\n\r\n"),
            400);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost : localhost\r\n\r\n"), 400);
  EXPECT_EQ(status(std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 15)), 400);
  EXPECT_EQ(status("GET / HTTP/1.0\r\n\r\n"), 200);  // which needs no Host
  EXPECT_EQ(Ask("/healthz").status, 200);
}

TEST_F(HttpTest, LargeHeadsAreRefused) {
  Start();
  const std::string large(20000, 'x');
  EXPECT_EQ(Get(port_, "/healthz", "X-Large: " + large + "\r\n").status, 431);
  EXPECT_EQ(Get(port_, "/" + large).status, 431);
  // Without an end, and never a line's.
  HttpConnection endless(port_);
  for (int i = 0; i < 1000 && endless.Send(std::string(1000, 'y')); ++i) {
  }
  endless.ReadAll();
  EXPECT_TRUE(endless.closed());
  std::string many;
  for (int i = 0; i < 2000; ++i) many += "X-" + std::to_string(i) + ": 1\r\n";
  EXPECT_EQ(Get(port_, "/healthz", many).status, 431);
}

// Who sends a byte now and then, or nothing, loses the connection when the time is over.
TEST_F(HttpTest, SlowRequestsAreCutOff) {
  Start({"--http-timeout", "1"});
  HttpConnection silent(port_), slow(port_);
  std::thread drip([&] {
    const std::string request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ";
    for (size_t i = 0; i < 200; ++i) {
      if (!slow.Send(i < request.size() ? request.substr(i, 1) : "x")) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  EXPECT_EQ(silent.ReadAll(), "");
  EXPECT_TRUE(silent.closed());
  EXPECT_EQ(slow.ReadAll(), "");
  EXPECT_TRUE(slow.closed());
  drip.join();
  EXPECT_EQ(Ask("/healthz").status, 200);
}

TEST_F(HttpTest, ConnectionsAreBoundedAndComeBack) {
  Start({"--http-max-connections", "4", "--http-timeout", "2"});
  std::vector<HttpConnection> held;
  // Those that have asked hold their places until they have read their answers, or for a second.
  EXPECT_TRUE(Eventually([&] {
    held.clear();
    for (int i = 0; i < 4; ++i) {
      held.emplace_back(port_);
      held.back().Send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    }
    return Ask("/healthz").status == 503;
  }));
  // The protocol of the clients does not suffer.
  EXPECT_OK(Client()->Stats());
  held.clear();
  EXPECT_TRUE(Eventually([&] { return Ask("/healthz").status == 200; }));
  // Neither do those that never read their answer keep their places.
  for (int i = 0; i < 4; ++i) {
    held.emplace_back(port_);
    held.back().Send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  }
  EXPECT_TRUE(Eventually([&] { return Ask("/healthz").status == 200; }));
}

// Who says nothing, or begins a request and stops, keeps nobody out: the longest connected goes.
TEST_F(HttpTest, SilentPeersMakeRoomForThoseThatAsk) {
  Start({"--http-max-connections", "4", "--http-timeout", "600"});
  std::vector<HttpConnection> silent;
  for (int i = 0; i < 4; ++i) {
    silent.emplace_back(port_);
    if (i % 2 == 1) silent.back().Send("GET /healthz HTTP/1.1\r\nHost: loc");
  }
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Ask("/healthz").status, 200) << i;
  EXPECT_EQ(silent.front().ReadAll(), "");
  EXPECT_TRUE(silent.front().closed());
  // One that is slow, and not the longest, still gets its answer.
  HttpConnection slow(port_);
  slow.Send("GET /healthz HTTP/1.1\r\n");
  EXPECT_EQ(Ask("/healthz").status, 200);
  slow.Send("Host: localhost\r\n\r\n");
  EXPECT_NE(slow.ReadAll().find("200"), std::string::npos);
}

TEST_F(HttpTest, ManyReadersGetWholeAnswers) {
  Start({"--http-max-connections", "16"});
  Use("team-a");
  std::vector<std::thread> readers;
  std::atomic<int> whole{0}, other{0};
  for (int r = 0; r < 8; ++r) {
    readers.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        const HttpReply reply = Ask(i % 2 ? "/metrics" : "/status.json", kOperator);
        const bool ok = reply.status == 200 &&
                        reply.fields.at("content-length") == std::to_string(reply.body.size());
        ++(ok ? whole : other);
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(other, 0);
  EXPECT_EQ(whole, 160);
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->Wait(), 0) << daemon_->Stderr();
}

// Answers are bounded however many prefixes and sessions there are, and whatever tenants are named.
TEST_F(HttpTest, ACrowdOfOddTenantsIsShownInPart) {
  constexpr size_t kTenants = 20, kSessions = 200;
  const uint64_t seed = Seed("Crowd");
  Start();
  std::vector<std::unique_ptr<RemoteStore>> clients;
  std::vector<std::shared_ptr<Session>> sessions;
  for (size_t t = 0; t < kTenants; ++t) {
    const std::string names[] = {"<img src=x onerror=alert(1)>", std::string(250, 'w'),
                                 "\u6cd5\u52d9\u90e8 \xf0\x9f\xa6\x89", "\u202eteam", "a\"b\\c\nd"};
    clients.push_back(Client(names[t % std::size(names)] + std::to_string(t)));
    ASSERT_TRUE(clients.back());
    for (uint32_t n : {64, 72, 80}) {
      ASSERT_OK(PutPrompt(*clients.back(), MakePrompt(n, seed + 1000 * t + n)));
    }
    AttachSpec spec;
    const Prompt prompt = MakePrompt(80, seed + 1000 * t + 80);
    spec.model = prompt.model.name;
    spec.tokens = prompt.tokens;
    spec.policy.k = 8;
    for (size_t s = 0; s < kSessions / kTenants; ++s) {
      auto session = clients.back()->Attach(spec);
      ASSERT_OK(session);
      sessions.push_back(*std::move(session));
    }
  }
  const HttpReply reply = Ask("/status.json", kOperator);
  const nlohmann::json status = nlohmann::json::parse(reply.body, nullptr, false);
  ASSERT_FALSE(status.is_discarded());
  const nlohmann::json& watch = status["watch"];
  EXPECT_EQ(status["runtime"]["sessions"], kSessions);
  EXPECT_EQ(watch["sessions"].size(), 50u);
  EXPECT_EQ(watch["sessions_left_out"], kSessions - 50);
  EXPECT_EQ(watch["prefixes"].size(), 50u);
  EXPECT_EQ(watch["prefixes_left_out"], 3 * kTenants - 50);
  EXPECT_LT(reply.body.size(), 256u << 10);
  const Exposition e = ParseExposition(Ask("/metrics", kOperator).body);
  EXPECT_TRUE(e.wrong.empty()) << e.wrong.front();
  double attached = 0;
  for (const auto& [series, value] : e.values) {
    if (series.starts_with("prefixd_tenant_sessions{")) attached += value;
  }
  EXPECT_EQ(attached, double(kSessions));
}

// What Prometheus keeps must not grow with the tenants that come: those that take most are named.
TEST(MetricsTest, ManyTenantsAreNotAllNamed) {
  const size_t kTenants = daemon::kNamedTenants * 3;
  RuntimeStats runtime;
  std::map<std::string, uint64_t> prefixes;
  const auto name = [](size_t i) { return "tenant-" + std::to_string(i); };
  for (size_t i = 0; i < kTenants; ++i) {
    runtime.tenants.push_back({.tenant = name(i), .bytes = 1000 + (i * 7919) % kTenants});
    runtime.memory_tenants.push_back({.tenant = name(i), .bytes = 1});
    prefixes[name(i)] = 1;
  }
  const wire::ServerStats server;
  const auto watch = std::make_unique<daemon::Watch::Report>();
  const Exposition e = ParseExposition(daemon::MetricsText(
      {{.sees = daemon::Viewer::Sees::kAll}, server, runtime, *watch, prefixes, true}));
  EXPECT_TRUE(e.wrong.empty()) << e.wrong.front();
  EXPECT_EQ(e.Of("prefixd_tenants_left_out"), double(kTenants - daemon::kNamedTenants));
  for (const std::string family :
       {"prefixd_store_tenants_bytes", "prefixd_tenant_prefixes", "prefixd_tenant_sessions",
        "prefixd_store_memory_tenants_bytes"}) {
    size_t series = 0;
    for (const auto& [key, value] : e.values) series += key.starts_with(family + "{");
    EXPECT_EQ(series, daemon::kNamedTenants) << family;
  }
  // The one that takes most is among them, the one that takes least is not.
  for (size_t i = 0; i < kTenants; ++i) {
    const size_t rank = (i * 7919) % kTenants;
    const std::string series = "prefixd_tenant_prefixes{tenant=\"" + name(i) + "\"}";
    EXPECT_EQ(e.values.contains(series), rank >= kTenants - daemon::kNamedTenants) << series;
  }
}

// Names are bytes, labels UTF-8: what is escaped still tells them apart.
TEST(MetricsTest, NamesThatAreNotUtf8StayApart) {
  const std::vector<std::string> names = {"a\xff", "a\xfe", "a\\xff", "a\xc3\xa4", "a\xc3\xa4\xff"};
  RuntimeStats runtime;
  std::map<std::string, uint64_t> prefixes;
  for (const std::string& name : names) prefixes[name] = 1 + prefixes.size();
  const auto watch = std::make_unique<daemon::Watch::Report>();
  const Exposition e = ParseExposition(daemon::MetricsText(
      {{.sees = daemon::Viewer::Sees::kAll}, {}, runtime, *watch, prefixes, true}));
  EXPECT_TRUE(e.wrong.empty()) << e.wrong.front();
  size_t series = 0;
  for (const auto& [key, value] : e.values) series += key.starts_with("prefixd_tenant_prefixes{");
  EXPECT_EQ(series, names.size());
  EXPECT_EQ(e.Of("prefixd_tenant_prefixes{tenant=\"a\xc3\xa4\"}"), prefixes["a\xc3\xa4"]);
}

// It stops in order while readers ask and others hold connections.
TEST_F(HttpTest, ItStopsWhileReadersAsk) {
  Start();
  Use("team-a");
  HttpConnection held(port_);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      HttpConnection connection(port_);
      if (!connection.open()) continue;
      connection.Send("GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n");
      connection.ReadAll(1);
    }
  });
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->Wait(), 0) << daemon_->Stderr();
  stop = true;
  reader.join();
}

}  // namespace
}  // namespace prefixd::testing
